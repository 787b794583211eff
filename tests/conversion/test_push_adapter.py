"""An adapter goes to the Hub and comes back: privately, without stray files, with a card, and found again by its commit."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from modeling_moe_lc import MoeLcForCausalLM, add_lora, lora_targets
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.conversion.adapter_card import adapter_card
from modeling_moe_lc.conversion.card import About
from modeling_moe_lc.training.sharded_adapters import save_adapter


HERE = Path(__file__).parent
hub_server, hub_client = (runpy.run_path(str(HERE / f"{name}.py")) for name in ("hub_server", "hub_client"))
REPO = "user/adapter"
PRELOAD = "import torch, safetensors.torch, peft, modeling_moe_lc.conversion.push, modeling_moe_lc.training.cli"
PUSH = "from modeling_moe_lc.training.cli import main; raise SystemExit(main(['push', adapter, repo, *options]))"
PULL = """
from modeling_moe_lc import MoeLcForCausalLM, load_lora
model = load_lora(MoeLcForCausalLM.from_pretrained(base), repo, revision=revision)
expected = safetensors.torch.load_file(expected)
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a base, an adapter in a folder that holds more, and what both say to some tokens."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    MoeLcForCausalLM(load_preset("tiny")).save_pretrained(folder / "base")
    base = MoeLcForCausalLM.from_pretrained(folder / "base")
    config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **lora_targets("attention", "experts"))
    adapted = add_lora(base, config).eval()
    save_adapter(adapted, folder / "adapter")
    (folder / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "adapter" / "notes.txt").write_text("private")
    ids = torch.randint(3, 500, (1, 9))
    with torch.no_grad():
        save_file({"ids": ids, "logits": adapted(ids).logits}, folder / "expected.safetensors")
    return folder


@pytest.fixture(scope="module")
def server():
    with hub_server["serving"]() as hub:
        yield hub


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("client") / "folder"
    with hub_client["client"](server.endpoint, hub_server["TOKEN"], home, PRELOAD) as started:
        yield started


def push(client, folder, *options):
    client.start(PUSH, adapter=str(folder / "adapter"), repo=REPO, options=list(options))
    return client.wait()


def test_what_is_pushed_is_pulled_by_its_commit(server, client, folder):
    code, out, err = push(client, folder, "--license", "mit", "--base-model", "user/base")
    assert code == 0, err
    assert server.repos[REPO].private and "(private)" in out and "load_lora(model" in out
    revision = out.split('revision="')[1][:40]
    files = {
        path: file.content for path, file in server.repos[REPO].tree("main")[1].items() if path != ".gitattributes"
    }
    card = files.pop("README.md").decode()
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}
    assert all(content == (folder / "adapter" / name).read_bytes() for name, content in files.items())
    for part in (
        f'revision="{revision}"',
        "base_model: user/base",
        "license: mit",
        "rank 3, alpha 6",
        "library_name: peft",
    ):
        assert part in card
    names = {"base": str(folder / "base"), "repo": REPO, "expected": str(folder / "expected.safetensors")}
    client.run(PULL, revision=revision, **names)
    head = server.repos[REPO].head
    assert push(client, folder, "--license", "mit", "--base-model", "user/base")[0] == 0
    assert server.repos[REPO].head == head, "nothing is new, so that nothing is committed"


def test_a_card_names_no_folder_of_this_machine(folder):
    card = adapter_card(folder / "adapter")
    assert str(folder) not in card and "base_model" not in card and "Licence: unknown" in card
    released = adapter_card(folder / "adapter", About(base_model="moonshotai/Kimi-Linear-48B-A3B-Instruct"))
    assert "license: mit" in released


def test_what_is_no_lora_is_refused(folder, tmp_path):
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="adapter: expected adapter_model.safetensors in"):
        adapter_card(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(ValueError, match="expected peft_type 'LORA', got 'IA3'"):
        adapter_card(tmp_path)
