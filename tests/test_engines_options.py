"""Command lines: options of the installed SGLang and router, pass-through, what slime sets itself."""

import shutil
import subprocess
import sys

import pytest

from slime.backends.sglang_utils.router import router_command
from slime.backends.sglang_utils.server import EngineSpec, SGLangServer, server_command, server_env
from slime.config import Args, ConfigError
from slime.config.engine_options import (
    RESERVED_SERVER,
    Option,
    command_line,
    known_router_options,
    known_server_options,
    overlay,
    router_options,
    server_options,
)

KNOWN = {
    "tp_size": Option("--tp-size", "value", "tp_size"),
    "tensor_parallel_size": Option("--tp-size", "value", "tp_size"),
    "verbose": Option("--verbose", "switch", "verbose"),
    "fuse": Option("--fuse", "toggle", "fuse"),
    "names": Option("--names", "list", "names"),
    "extra": Option("--extra", "value", "extra"),
}


def flag(command, name):
    return command[command.index(name) + 1]


def test_words_of_every_kind():
    options = {"tp_size": 2, "verbose": True, "fuse": "false", "names": "a 'b c'", "extra": {"k": [1]}}
    words = ["--tp-size", "2", "--verbose", "--no-fuse", "--names", "a", "b c", "--extra", '{"k": [1]}']
    assert command_line(options, KNOWN) == words
    assert command_line({"verbose": False, "names": ["x", 1]}, KNOWN) == ["--names", "x", "1"]
    assert command_line({"new_thing": 3}, None) == ["--new-thing", "3"]
    with pytest.raises(ConfigError, match="--verbose is on or off"):
        command_line({"verbose": "maybe"}, KNOWN)


def test_alias_replaces_the_default_that_it_means():
    assert overlay({"tp_size": 1, "verbose": True}, {"tensor_parallel_size": 4}, KNOWN, {}, "--sglang-") == {
        "tensor_parallel_size": 4,
        "verbose": True,
    }


def test_unknown_and_reserved_names_are_refused():
    with pytest.raises(ConfigError, match="--sglang-no-such-thing"):
        overlay({}, {"no_such_thing": 1}, KNOWN, {}, "--sglang-")
    with pytest.raises(ConfigError, match="--sglang-tensor-parallel-size.*--rollout-num-gpus-per-engine"):
        overlay({}, {"tensor_parallel_size": 1}, KNOWN, RESERVED_SERVER, "--sglang-")


def test_options_of_the_installed_packages_are_read_without_importing_them():
    code = (
        "import sys; from slime.config.engine_options import *; "
        "assert len(known_server_options()) > 100 and len(known_router_options()) > 30; "
        "print([m for m in ('sglang', 'sglang_router', 'torch', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "[]"


def test_installed_packages_have_what_slime_passes():
    assert {"mem_fraction_static", "tp_size", "tensor_parallel_size", "sleep_on_idle"} <= known_server_options()
    assert {"policy", "prometheus_port", "retry_max_retries", "worker_urls"} <= known_router_options()
    assert server_options()["tensor_parallel_size"].field == "tp_size"
    assert server_options()["disable_radix_cache"].kind == "switch"
    assert router_options()["worker_urls"].kind == "list"


def test_cpu_engine_command_and_environment(tiny_engine_args):
    args = tiny_engine_args.replace(rollout_seed=7, sglang={"max_running_requests": "5", "log_level": "error"})
    spec = EngineSpec.from_args(args, 3)
    command = server_command(args, spec, port=1234, nccl_port=1235)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert flag(command, "--device") == "cpu" and flag(command, "--attention-backend") == "torch_native"
    assert flag(command, "--dtype") == "float32" and flag(command, "--random-seed") == "10"
    assert flag(command, "--context-length") == "130"  # 128 tokens can be reached
    assert flag(command, "--max-running-requests") == "5" and flag(command, "--log-level") == "error"
    assert "--sleep-on-idle" in command and "--disable-radix-cache" not in command
    env = server_env(args, spec, {"MASTER_PORT": "1", "PYTHONPATH": "mine"})
    assert env["PYTHONPATH"].split(":")[-1] == "mine" and "stand_ins" in env["PYTHONPATH"].split(":")[0]
    assert "MASTER_PORT" not in env and env["HF_HUB_OFFLINE"] == "1" and env["CUDA_VISIBLE_DEVICES"] == ""


def test_cuda_engine_command_over_two_nodes(tiny_engine_args):
    args = tiny_engine_args.replace(
        device="cuda", rollout_num_gpus=16, rollout_num_gpus_per_engine=16, offload_rollout=True
    )
    spec = EngineSpec.from_args(args, 0, host="10.0.0.2", nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:20000")
    command = server_command(args, spec, port=1234, nccl_port=1235)
    for name, value in {
        "--tp-size": "16",
        "--nnodes": "2",
        "--node-rank": "1",
        "--dist-init-addr": "10.0.0.1:20000",
    }.items():
        assert flag(command, name) == value
    assert "--enable-memory-saver" in command and "--device" not in command and "--base-gpu-id" in command
    env = server_env(args, spec, {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "mine"})
    assert "CUDA_VISIBLE_DEVICES" not in env and env["PYTHONPATH"] == "mine" and "SGLANG_USE_CPU_ENGINE" not in env


def test_engines_sample_with_different_seeds(tiny_engine_args):
    assert len({EngineSpec.from_args(tiny_engine_args, i).seed for i in range(4)}) == 4


def test_bad_model_folders_are_refused_before_anything_starts(tiny_engine_args, tmp_path):
    def start(folder):
        args = tiny_engine_args.replace(hf_checkpoint=str(folder))
        server = SGLangServer(args, EngineSpec.from_args(args))
        with pytest.raises(ConfigError) as error:
            server.start()
        assert server.pids() == []
        return str(error.value)

    assert "no such folder" in start(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "config.json" in start(tmp_path / "empty")
    (tmp_path / "no_weights").mkdir()
    shutil.copy(f"{tiny_engine_args.hf_checkpoint}/config.json", tmp_path / "no_weights")
    assert "no weights" in start(tmp_path / "no_weights")


def test_router_command():
    args = Args(router={"policy": "round_robin", "disable_retries": True})
    command = router_command(args, "127.0.0.1", 10, 11)
    assert flag(command, "--policy") == "round_robin" and flag(command, "--prometheus-port") == "11"
    assert "--disable-retries" in command
    with pytest.raises(ConfigError, match="--router-port.*--sglang-router-port"):
        router_command(args.replace(router={"port": 5}), "127.0.0.1", 10, 11)
