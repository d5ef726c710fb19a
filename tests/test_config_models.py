"""config.json of a model: old and new files, wrong ones, and what makes two of them the same model."""

import json

import pytest
from test_config import TINY

from slime.config import ConfigError
from slime.config.hf_config import check_same_model, load_hf_config, parse_hf_config

MOE = {
    **TINY, "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
WINDOW = {**TINY, "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4}


def test_hf_config_of_old_and_new_files():
    assert parse_hf_config(TINY).rope_theta == 12345.0 and parse_hf_config(TINY).qk_norm
    old = {**TINY, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    del old["rope_parameters"]
    config = parse_hf_config(old)
    assert config.rope_theta == 5e5 and config.rope_scaling["factor"] == 8.0 and not config.qk_norm
    assert parse_hf_config({**TINY, "model_type": "qwen2", "sliding_window": 64}).sliding_window is None
    with pytest.raises(ConfigError, match="'hidden_size' is missing"):
        parse_hf_config({"model_type": "llama", "num_attention_heads": 2})


def test_model_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match="there is no config.json in it"):
        load_hf_config(tmp_path)
    for text, message in (
        (b"\xff", "cannot be read as JSON"),
        (b"[1]", "it holds a list"),
        (
            json.dumps({**TINY, "num_hidden_layers": "4"}).encode(),
            "num_hidden_layers is '4'; it must be a whole number",
        ),
    ):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (MOE, dict(routed_scaling_factor=1.0), "routed_scaling_factor 1.0 instead of 2.5"),
        (MOE, dict(norm_topk_prob=False), "norm_topk_prob False instead of True"),
        (MOE, dict(topk_group=2), r"expert_groups \(2, 2\) instead of \(2, 1\)"),
        (WINDOW, dict(layer_types=["full_attention", *WINDOW["layer_types"][1:]]),
         r"windowed_layers \[1, 2, 3\] instead of \[0, 1, 2, 3\]"),
        (TINY, dict(hidden_act="gelu"), "hidden_act gelu instead of silu"),
        (TINY, dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0}),
         "rope_scaling .* instead of None"),
    ],
)  # fmt: skip
def test_models_that_compute_something_else_are_others(raw, change, message):
    with pytest.raises(ConfigError, match=f"x is another model than --hf-checkpoint: {message}"):
        check_same_model(parse_hf_config(raw), parse_hf_config({**raw, **change}), "x")


def test_files_that_say_the_same_in_other_words_are_one_model():
    own = parse_hf_config({**TINY, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0}})
    old = {k: v for k, v in TINY.items() if k != "rope_parameters"}
    old |= {"rope_theta": 12345.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    check_same_model(own, parse_hf_config(old), "x")
    old["rope_scaling"] = {"rope_type": "default"}
    check_same_model(parse_hf_config(TINY), parse_hf_config(old), "x")
    full = {**TINY, "layer_types": ["full_attention"] * 4, "sliding_window": 8, "max_window_layers": 4}
    check_same_model(parse_hf_config(TINY), parse_hf_config(full), "x")  # Qwen's use_sliding_window is off
    with pytest.raises(ConfigError, match="layer_types has 1 entries, num_hidden_layers is 4"):
        parse_hf_config({**WINDOW, "layer_types": ["full_attention"]})
