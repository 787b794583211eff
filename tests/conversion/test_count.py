"""The totals of the released models and of the presets that speed is compared on, to the last parameter."""

import pytest

from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset
from modeling_moe_lc.conversion.count import count
from modeling_moe_lc.training.cli import main


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("kimi-k3", 2_779_484_476_000, 104_189_612_640),
        ("kimi-linear-48b-a3b", 49_122_681_728, None),
        ("200m-a90m", 205_308_278, 89_309_558),
        ("1b-a200m", 947_631_072, 206_287_840),
    ],
)
def test_totals(preset, total, active):
    counted = count(load_preset(preset))
    assert counted.total == total
    assert active is None or counted.active == active
    assert "other" not in counted.terms


def test_total_of_k3_with_vision(capsys):
    counted = count(load_multimodal_preset("kimi-k3"))
    assert (counted.total, counted.active) == (2_779_931_834_976, 104_189_612_640)
    assert (counted.terms["vision tower"], counted.terms["projector"]) == (401_214_464, 46_144_512)
    assert "other" not in counted.terms
    main(["count", "kimi-k3"])
    assert "2,779,931,834,976" in capsys.readouterr().out


def test_state_and_cache_of_k3():
    counted = count(load_preset("kimi-k3"))
    assert (counted.state_bytes, counted.cache_bytes_per_token) == (449_372_160, 27_648)


def test_tied_embedding_is_counted_once_and_active():
    apart, tied = (count(load_preset("tiny", tie_word_embeddings=tie)) for tie in (False, True))
    assert apart.total - tied.total == 512 * 64
    assert apart.active == tied.active


def test_command_prints_the_total(capsys):
    main(["count", "kimi-linear-48b-a3b"])
    assert "49,122,681,728" in capsys.readouterr().out


def test_a_context_is_a_number_of_tokens(capsys):
    assert main(["count", "nano", "--context", "512", "0"]) == 2
    assert "context: expected 1 token or more, got 0" in capsys.readouterr().err


def test_another_model_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    for command in ("count", "card"):
        assert main([command, str(tmp_path)]) == 2
        assert "config.json: expected one of" in capsys.readouterr().err
