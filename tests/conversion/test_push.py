"""What is pushed comes back to the byte, stays private, survives a kill and a bad network, and is found again by its commit.

Against a server that speaks the Hub's endpoints (hub_server.py), by `huggingface_hub` itself over real HTTP.
"""

import runpy
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset


HERE = Path(__file__).parent
hub_server, hub_client = (runpy.run_path(str(HERE / f"{name}.py")) for name in ("hub_server", "hub_client"))
REPO = "user/tiny"
# The code of the model is read once, and not by every push.
WITH_PACKAGE = """
import torch, modeling_moe_lc.conversion.push, modeling_moe_lc.training.cli
from modeling_moe_lc.conversion import export_remote_code as exporting

entries = sorted({path.rpartition(".")[0] for path in exporting.AUTO_CLASSES["moe_lc_text"].values()})
sources = exporting.import_closure(exporting.PACKAGE, sys.modules[exporting.PACKAGE].__path__, entries)
exporting.import_closure = lambda *arguments: sources
"""
BARE = """
import torch, safetensors.torch
from transformers import AutoModelForCausalLM

sys.modules["modeling_moe_lc"] = None
"""
PUSH = "from modeling_moe_lc.training.cli import main; raise SystemExit(main(['push', checkpoint, repo, *options]))"
STORED = r"PUT /store/"


@pytest.fixture(scope="module")
def server():
    with hub_server["serving"]() as hub:
        yield hub


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("client") / "folder"
    with hub_client["client"](server.endpoint, hub_server["TOKEN"], folder, WITH_PACKAGE) as started:
        yield started


@pytest.fixture
def hub(server):
    """The server, as if it had just been started."""
    for held in (server.repos, server.store, server.log, server.failures):
        held.clear()
    server.on_stored = None
    return server


def save(folder, seed, shard_size="100KB"):
    torch.manual_seed(seed)
    model = MoeLcForCausalLM(load_preset("tiny")).eval()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """In shards, beside what its model says to some tokens."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    model = save(folder, seed=0)
    input_ids = torch.randint(model.config.vocab_size, (1, 23))
    with torch.no_grad():
        save_file({"ids": input_ids, "logits": model(input_ids).logits}, folder.parent / "expected.safetensors")
    assert len(list(folder.glob("*.safetensors"))) > 5
    return folder


@pytest.fixture(scope="module")
def expected_files(client, checkpoint):
    """What `moe-lc export-remote-code` makes of the checkpoint."""
    exported = checkpoint.parent / "exported"
    client.run("exporting.export_remote_code(checkpoint, out)", checkpoint=str(checkpoint), out=str(exported))
    return {file.relative_to(exported).as_posix(): file.read_bytes() for file in exported.rglob("*") if file.is_file()}


def push(client, checkpoint, *options, repo=REPO):
    """The exit code, the output, the errors."""
    client.start(PUSH, checkpoint=str(checkpoint), repo=repo, options=list(options))
    return client.wait()


def pinned(out):
    """The revision that the command names."""
    return out.split('revision="')[1][:40]


def contents(hub, revision="main", repo=REPO):
    return {path: file.content for path, file in hub.repos[repo].tree(revision)[1].items() if path != ".gitattributes"}


def leftovers(checkpoint):
    return [path.name for path in checkpoint.parent.iterdir() if path.name.startswith(".")]


def test_what_is_pushed_comes_back_to_the_byte_and_only_to_its_owner(
    hub, client, checkpoint, expected_files, tmp_path
):
    code, out, err = push(client, checkpoint)
    assert code == 0, err
    pushed, head = contents(hub), hub.repos[REPO].head
    card = pushed.pop("README.md").decode()
    assert pushed == expected_files
    assert hub.repos[REPO].private and "(private)" in out
    revision = pinned(out)
    assert contents(hub, revision) == expected_files
    assert f'revision="{revision}"' in card and f'"{REPO}"' in card and "trust_remote_code=True" in card
    assert leftovers(checkpoint) == []

    pull = "from huggingface_hub import snapshot_download; print(snapshot_download(repo, **options))"
    options = {"revision": revision, "local_dir": str(tmp_path / "whole")}
    client.run(pull, repo=REPO, options=options)
    for name, content in expected_files.items():
        assert (tmp_path / "whole" / name).read_bytes() == content
    anonymous = {**options, "local_dir": str(tmp_path / "anonymous"), "token": False}
    client.start(pull, repo=REPO, options=anonymous)
    assert client.wait()[0] == 1 and not (tmp_path / "anonymous" / "config.json").exists()

    hub.log.clear()
    options = {"revision": head, "local_dir": str(tmp_path / "part"), "allow_patterns": ["*.json"]}
    client.run(pull, repo=REPO, options=options)
    pulled = {path.name for path in (tmp_path / "part").iterdir() if path.is_file()}
    assert pulled == {name for name in expected_files if name.endswith(".json")}
    assert hub.requests(r"\.safetensors$") == []


def test_a_pinned_revision_stays_what_it_was_and_needs_no_package(hub, client, checkpoint, tmp_path):
    code, out, err = push(client, checkpoint)
    assert code == 0, err
    revision = pinned(out)
    other = tmp_path / "checkpoint"
    save(other, seed=1, shard_size="50GB")
    code, out, err = push(client, other)
    assert code == 0, err
    weights = {path for path in contents(hub) if path.endswith((".safetensors", ".safetensors.index.json"))}
    assert weights == {"model.safetensors"}, "main holds the weights of the last push and no others"
    load = """
model = AutoModelForCausalLM.from_pretrained(repo, revision=revision, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
expected = safetensors.torch.load_file(expected)
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
"""
    expected = str(checkpoint.parent / "expected.safetensors")
    with hub_client["client"](hub.endpoint, hub_server["TOKEN"], tmp_path / "bare", BARE) as bare:
        bare.run(load, repo=REPO, revision=revision, expected=expected)


def test_a_killed_push_shows_nothing_and_the_next_sends_only_what_is_missing(hub, client, checkpoint, expected_files):
    shards = [name for name in expected_files if name.endswith(".safetensors")]
    stored = []

    def kill_at_the_sixth(oid):
        stored.append(oid)
        if len(stored) == 6:
            client.kill()

    hub.on_stored = kill_at_the_sixth
    assert push(client, checkpoint)[0] == -signal.SIGKILL
    hub.on_stored = None
    assert list(contents(hub)) == []
    there = set(hub.store)
    assert 6 <= len(there) < len(shards)
    hub.log.clear()
    code, out, err = push(client, checkpoint)
    assert code == 0, err
    sent = [path.rpartition("/")[2] for _, path, _ in hub.requests(STORED)]
    assert len(sent) == len(set(sent)) == len(shards) - len(there) and there.isdisjoint(sent)
    assert {name: content for name, content in contents(hub).items() if name != "README.md"} == expected_files
    assert leftovers(checkpoint) == []

    hub.log.clear()
    before = hub.repos[REPO].head
    code, again, err = push(client, checkpoint)
    assert code == 0, err
    assert hub.repos[REPO].head == before, "nothing is new, so that nothing is committed"
    assert pinned(again) == pinned(out)
    assert hub.requests(STORED) == hub.requests("POST .*/commit/") == []


def test_a_bad_network_is_lived_with(hub, client, checkpoint, expected_files, tmp_path):
    hub.fail(STORED, "500", times=2)
    hub.fail(STORED, "drop", times=2, skip=3)
    hub.fail("objects/batch", "500")
    hub.fail("preupload", "drop")
    code, _, err = push(client, checkpoint)
    assert code == 0, err
    assert contents(hub).keys() - {"README.md"} == expected_files.keys()
    assert all(not failure.times for failure in hub.failures)

    hub.failures.clear()
    name = max(
        (name for name in expected_files if name.endswith(".safetensors")), key=lambda n: len(expected_files[n])
    )
    hub.fail(f"GET .*/{name}", "truncate", times=2, after=1000)
    hub.log.clear()
    pull = "from huggingface_hub import hf_hub_download; print(hf_hub_download(repo, name, local_dir=folder))"
    client.run(pull, repo=REPO, name=name, folder=str(tmp_path))
    assert (tmp_path / name).read_bytes() == expected_files[name]
    assert len(hub.requests(f"GET .*/{name}")) == 3


@pytest.mark.parametrize("where", [STORED, "POST .*/commit/"])
def test_a_network_that_stays_bad_is_said_and_loses_nothing(hub, client, checkpoint, expected_files, where):
    hub.fail(where, "500", times=50, skip=2 if where == STORED else 0)
    code, out, err = push(client, checkpoint)
    assert code == 1 and out == ""
    assert f"the push to {REPO} stopped" in err and "500" in err and "Traceback" not in err
    there = set(hub.store)
    hub.failures.clear()
    hub.log.clear()
    assert push(client, checkpoint)[0] == 0
    assert there.isdisjoint(path.rpartition("/")[2] for _, path, _ in hub.requests(STORED))
    assert contents(hub).keys() - {"README.md"} == expected_files.keys()


def test_a_repository_that_everyone_can_read_is_refused_unless_asked_for(hub, client, checkpoint):
    hub.repos[REPO] = hub_server["Repo"](private=False)
    hub.repos[REPO].commit({})
    code, _, err = push(client, checkpoint)
    assert code == 2 and "repo: expected a private one, or --public, got user/tiny" in err
    assert contents(hub) == {} == hub.store
    assert push(client, checkpoint, "--public")[0] == 0
    assert push(client, checkpoint, "--public", repo="new")[0] == 0
    assert not hub.repos["user/new"].private


def test_a_card_that_somebody_wrote_is_never_replaced_by_one_that_is_made(hub, client, checkpoint, tmp_path):
    own, written = tmp_path / "checkpoint", b"---\nlicense: mit\n---\nMine.\n"
    shutil.copytree(checkpoint, own)
    (own / "README.md").write_bytes(written)
    code, out, err = push(client, own)
    assert code == 0, err
    assert contents(hub)["README.md"] == written
    assert pinned(out) == hub.repos[REPO].head
    code, out, err = push(client, checkpoint)
    assert code == 0, err
    assert contents(hub)["README.md"] == written and "the one on the Hub" in out


def test_a_made_card_follows_the_model(hub, client, checkpoint, tmp_path):
    code, first, err = push(client, checkpoint, "--license", "mit")
    assert code == 0, err
    other = tmp_path / "checkpoint"
    save(other, seed=1)
    code, second, err = push(client, other, "--license", "mit")
    assert code == 0, err
    assert pinned(first) != pinned(second)
    card = contents(hub)["README.md"].decode()
    assert pinned(second) in card and pinned(first) not in card and "license: mit" in card
    code, third, err = push(client, other, "--license", "apache-2.0")
    assert code == 0, err
    card = contents(hub)["README.md"].decode()
    assert "license: apache-2.0" in card and pinned(third) in card
    assert contents(hub, pinned(third)).keys() == contents(hub).keys()


@pytest.mark.parametrize(
    ("breakage", "options", "repo", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), [], REPO, "expected a folder with config.json"),
        (lambda folder: [file.unlink() for file in folder.glob("*.safetensors")], [], REPO, "expected weights in"),
        (lambda folder: (folder / "README.md").write_text("---\n- a: [\n---\n"), [], REPO, "expected a model card"),
        (lambda folder: None, ["--license", "other"], REPO, "license: expected license_name and license_link"),
        (lambda folder: None, ["--run", "nowhere"], REPO, "run: expected a folder with recipe.yaml"),
        (lambda folder: None, [], "a/b/c", "repo: expected NAME or OWNER/NAME, got 'a/b/c'"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_a_word_is_sent(
    hub, client, checkpoint, tmp_path, breakage, options, repo, message
):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    breakage(folder)
    code, _, err = push(client, folder, *options, repo=repo)
    assert code == 2 and message in err
    assert hub.log == [] and leftovers(folder) == []


def test_push_to_hub_of_the_model_itself(hub, client, checkpoint):
    direct = """
import safetensors.torch
from transformers import AutoModelForCausalLM
expected = safetensors.torch.load_file(expected)
model = AutoModelForCausalLM.from_pretrained(checkpoint)
model.push_to_hub(repo, private=True, max_shard_size="100KB")
with torch.no_grad():
    assert torch.equal(AutoModelForCausalLM.from_pretrained(repo)(expected["ids"]).logits, expected["logits"])
"""
    client.run(
        direct,
        checkpoint=str(checkpoint),
        repo="user/direct",
        expected=str(checkpoint.parent / "expected.safetensors"),
    )
    assert hub.repos["user/direct"].private
    weights = {name for name in contents(hub, repo="user/direct") if name.endswith(".safetensors")}
    assert weights == {file.name for file in checkpoint.glob("*.safetensors")}
