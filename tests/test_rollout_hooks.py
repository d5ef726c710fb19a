"""Hooks are found and checked against the call that will be made, before anything starts."""

import subprocess
import sys

import pytest

from slime.config import Args
from slime.config.errors import ConfigError
from slime.config.hooks import check_hook, check_hooks, load_by_path, load_hook

HERE = __name__


async def good_rm(args, sample, **kwargs): ...
async def rm_without_kwargs(args, sample): ...
def rm_too_few(args): ...
def rm_too_many(args, sample, extra): ...
def rollout(args, rollout_id, data_buffer, evaluation=False): ...
def rollout_without_evaluation(args, rollout_id, data_source): ...
def rollout_any(*args, **kwargs): ...
def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): ...
def tis_other_names(args, loss, a, b, c, d, e): ...


class Source:
    def __init__(self, args): ...
    def get_samples(self, n): ...


NUMBER = 3


@pytest.mark.parametrize(
    "flag, name",
    [
        ("custom_rm_path", "good_rm"),
        ("custom_rm_path", "rm_without_kwargs"),
        ("rollout_function_path", "rollout"),
        ("rollout_function_path", "rollout_any"),
        ("custom_tis_function_path", "tis"),
    ],
)
def test_good_hooks(flag, name):
    assert load_hook(Args(**{flag: f"{HERE}.{name}"}), flag) is globals()[name]


@pytest.mark.parametrize(
    "flag, path, words",
    [
        ("custom_rm_path", f"{HERE}.rm_too_few", ["fn(args, sample)", "rm_too_few(args)", "too many positional"]),
        ("custom_rm_path", f"{HERE}.rm_too_many", ["rm_too_many(args, sample, extra)", "'extra'"]),
        ("custom_rm_path", f"{HERE}.NUMBER", ["int is no function"]),
        ("custom_rm_path", f"{HERE}.missing", ["has no 'missing'", "good_rm"]),
        ("custom_rm_path", "no.such.module.fn", ["no module 'no'", "PYTHONPATH"]),
        ("custom_rm_path", "nodots", ["no dotted path"]),
        ("rollout_function_path", f"{HERE}.rollout_without_evaluation", ["evaluation=...", "unexpected keyword"]),
        ("custom_tis_function_path", f"{HERE}.tis_other_names", ["pg_loss=...", "loss"]),
        ("data_source_path", f"{HERE}.Source", ["Source lacks add_samples, save, load, __len__"]),
    ],
)
def test_bad_hooks_say_flag_path_needed_and_found(flag, path, words):
    with pytest.raises(ConfigError) as error:
        load_hook(Args(**{flag: path}), flag)
    for word in ["--" + flag.replace("_", "-"), path, *words]:
        assert word in str(error.value), error.value


def test_a_module_that_fails_to_import(tmp_path, monkeypatch):
    (tmp_path / "broken_hook_a.py").write_text("import nothing_like_this\n")
    (tmp_path / "broken_hook_b.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing it failed with ModuleNotFoundError: .*nothing_like_this"):
        load_hook(Args(custom_rm_path="broken_hook_a.fn"), "custom_rm_path")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_hook(Args(custom_rm_path="broken_hook_b.fn"), "custom_rm_path")


def test_all_faults_are_reported_at_once():
    check_hooks(Args())
    with pytest.raises(ConfigError) as error:
        check_hooks(Args(custom_rm_path="a.b", buffer_filter_path="c.d"))
    assert len(str(error.value).splitlines()) == 2


def test_unset_and_builtin_functions():
    assert load_hook(Args(), "custom_rm_path") is None
    check_hook("--x", "builtins.print", print, "args")
    assert load_by_path("slime.config:Args") is Args


def test_importable_without_heavy_packages():
    code = "import sys, slime.config.hooks; assert not {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
