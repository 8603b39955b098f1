"""The configuration: derived sizes, all problems at once, and the form on disk."""

import json
import warnings

import pytest
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from model.config import PRESETS, MiniMindConfig, yarn_rope_parameters
from model.model_minimind import MiniMindForCausalLM, count_parameters
from tests.model.helpers import tiny_config


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("nano", 5.0, 5.0),
        ("nano-moe", 12.7, 5.0),
        ("mini", 25.8, 25.8),
        ("base", 63.9, 63.9),
        ("base-moe", 198.4, 64.0),
        ("large", 104.0, 104.0),
    ],
)
def test_presets_have_the_sizes_that_they_say(name, total, active):
    import torch

    with torch.device("meta"):
        model = MiniMindForCausalLM(MiniMindConfig.from_preset(name))
    counted = count_parameters(model)
    assert counted[0] / 1e6 == pytest.approx(total, rel=0.01)
    assert counted[1] / 1e6 == pytest.approx(active, rel=0.01)
    assert set(PRESETS) >= {name}


def test_sizes_follow_from_the_others():
    config = MiniMindConfig(hidden_size=768)
    assert (config.head_dim, config.intermediate_size, config.moe_intermediate_size) == (96, 2432, 1216)
    assert MiniMindConfig(num_key_value_heads=None).num_key_value_heads == 8


def test_all_problems_come_at_once():
    with pytest.raises(ValueError) as raised:
        MiniMindConfig(
            hidden_size=30, num_attention_heads=7, num_key_value_heads=3, dropout=1.5, bos_token_id=6400, use_moe=True,
            num_experts=2, num_experts_per_tok=3, rms_norm_eps=0, moe_implementation="fast", hidden_act="sillu",
        )  # fmt: skip
    text = str(raised.value)
    for part in (
        "hidden_size 30", "num_key_value_heads 3", "dropout is 1.5", "bos_token_id 6400", "num_experts_per_tok 3",
        "rms_norm_eps is 0", "moe_implementation 'fast'", "hidden_act 'sillu'",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    "fields", [{"vocab_size": 0}, {"num_hidden_layers": 2.5}, {"head_dim": 15}, {"hidden_size": -8}]
)
def test_sizes_must_make_sense(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        MiniMindConfig(**fields)


def test_rope_types_that_depend_on_the_length_are_refused():
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        MiniMindConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0})


def test_one_normalised_expert_is_refused_from_scratch_with_the_reason():
    fields = {"use_moe": True, "num_experts": 4, "num_experts_per_tok": 1}
    with pytest.raises(ValueError, match="w / w = 1.*no gradient"):
        MiniMindConfig(**fields, norm_topk_prob=True)
    assert MiniMindConfig(**fields, norm_topk_prob=False).num_experts_per_tok == 1
    assert MiniMindConfig(**fields, norm_topk_prob=True, router_frozen=True).router_weight_is_constant


def test_unknown_presets_and_fields_are_named():
    with pytest.raises(ValueError, match="'huge'.*nano"):
        MiniMindConfig.from_preset("huge")
    with pytest.raises(ValueError, match="hiden_size"):
        MiniMindConfig.from_preset("nano", {"hiden_size": 8})


@pytest.mark.parametrize("use_moe", [False, True])
def test_a_saved_config_is_a_qwen3_config_and_comes_back(tmp_path, use_moe, recwarn):
    config = tiny_config(use_moe=use_moe, rope_theta=12345.0)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == ("qwen3_moe" if use_moe else "qwen3")
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 12345.0
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert type(theirs) is (Qwen3MoeConfig if use_moe else Qwen3Config)
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 12345.0}
    if use_moe:
        assert saved["num_experts"] == saved["num_local_experts"] == 4 == theirs.num_experts
    back = MiniMindConfig.from_pretrained(tmp_path)
    for name in ("vocab_size", "head_dim", "intermediate_size", "rope_parameters", "use_moe", "tie_word_embeddings"):
        assert getattr(back, name) == getattr(config, name)
    assert not [str(warning.message) for warning in recwarn if "model_type" in str(warning.message)]


def test_a_version_4_file_keeps_its_own_defaults(tmp_path):
    """transformers 4 wrote rope_theta at the top and scaling under rope_scaling."""
    fields = {
        "model_type": "qwen3", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "rope_theta": 5000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = MiniMindConfig.from_pretrained(tmp_path)
    assert config.rope_theta == config.rope_parameters["rope_theta"] == 5000.0
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == 4.0
    assert config.tie_word_embeddings is False  # Qwen3's default, not ours
    del fields["rope_theta"], fields["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert MiniMindConfig.from_pretrained(tmp_path).rope_theta == 10_000.0


def test_existing_weights_with_one_normalised_expert_open_with_the_router_frozen(tmp_path):
    tiny_config(use_moe=True, num_experts_per_tok=1, router_frozen=True).save_pretrained(tmp_path)
    assert MiniMindConfig.from_pretrained(tmp_path).router_frozen


def test_other_model_types_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="'llama'"):
        MiniMindConfig.from_pretrained(tmp_path)
    fields = Qwen3Config(attention_bias=True).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="attention_bias"):
        MiniMindConfig.from_pretrained(tmp_path)


def test_yarn_is_written_for_both_versions(tmp_path):
    tiny_config(rope_parameters=yarn_rope_parameters(factor=4.0)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_scaling"]["factor"] == saved["rope_parameters"]["factor"] == 4.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MiniMindConfig.from_pretrained(tmp_path).rope_parameters["original_max_position_embeddings"] == 2048
