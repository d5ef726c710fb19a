"""A real SGLang engine and the real router: control calls, digests, ends. Deaths and recovery: `test_e2e.py`."""

import contextlib
import pickle
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from slime.backends.sglang_utils.checksum import EngineDigests, compare_digests
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.engine_layout import EngineLayout
from slime.backends.sglang_utils.process import free_port
from slime.backends.sglang_utils.router import RouterError, SGLangRouter
from slime.backends.sglang_utils.server import EngineSpec, SGLangServer
from slime.config.hf_config import load_hf_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def wait_for(condition, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.1)


def expected_digests(folder):
    engine = EngineDigests(EngineLayout(load_hf_config(folder), 1, True), dtype=torch.float32)
    for name, tensor in load_file(f"{folder}/model.safetensors").items():
        engine.add(name, tensor)
    return engine.finish()


@pytest.fixture
def client(tiny_engine):
    with EngineClient(tiny_engine.url) as client:
        yield client
        with contextlib.suppress(EngineError):
            client.continue_generation()


def greedy(client, prompt, n):
    return client.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": n, "ignore_eos": True},
        return_logprob=True,
    )


def test_digests_agree_for_a_tied_model(client, tiny_model):
    out = compare_digests(expected_digests(tiny_model), client.weights_checksum())
    assert out.wrong == [] and out.checked == 2 * 8 + 2
    only = client.weights_checksum(skip_names=["layers.0", "embed"])
    assert not any("layers.0" in name or "embed" in name for name in only[0]) and len(only[0]) == 8 + 1


def test_whole_context_can_be_generated(client):
    reply = greedy(client, [5] * 30, 98)
    assert reply["meta_info"]["completion_tokens"] == 98
    assert len(reply["meta_info"]["output_token_logprobs"]) == 98


def test_information_and_health(client, tiny_model):
    assert client.is_up() and client.model_info()["model_path"] == str(tiny_model)
    assert client.server_info()["tp_size"] == 1
    client.health()
    client.health_generate(60)


def test_pause_abort_flush_continue(client):
    for mode in ("abort", "retract", "in_place"):
        client.pause_generation(mode)
        client.continue_generation()
    client.abort_all()
    client.flush_cache()
    assert greedy(client, [7, 8, 9], 4)["meta_info"]["completion_tokens"] == 4


def test_update_from_disk_sets_the_version(client, tiny_model):
    client.update_weights_from_disk(str(tiny_model), weight_version="17")
    assert client.weight_version() == "17"
    assert greedy(client, [7, 8, 9], 2)["meta_info"]["weight_version"] == "17"


def test_refused_calls_say_where_and_why(client, tiny_engine):
    with pytest.raises(EngineError, match=f"{tiny_engine.url}/update_weights_from_disk: HTTP 400: .*nowhere") as error:
        client.update_weights_from_disk("/nowhere")
    assert error.value.status == 400
    with pytest.raises(EngineError, match="update_weights_from_distributed: HTTP 400: .*begin_weight_update"):
        client.update_weights_from_distributed(["a"], ["torch.bfloat16"], [(1,)], "group")
    assert client.begin_weight_update() and client.end_weight_update()
    with pytest.raises(EngineError, match="end_weight_update: HTTP 400"):
        client.end_weight_update()
    with pytest.raises(EngineError, match="destroy_weights_update_group"):
        client.destroy_weights_update_group("no such group")
    with pytest.raises(EngineError, match="no answer within"):
        client.health_generate(0.01)
    with EngineClient(f"http://127.0.0.1:{free_port()}") as nobody:
        assert not nobody.is_up()
        with pytest.raises(EngineError, match="ConnectError") as error:
            nobody.health()
    assert error.value.status is None


def test_memory_is_released_right_after_a_response(client):
    greedy(client, [7, 8, 9], 4)
    client.release_memory_occupation()
    client.resume_memory_occupation()
    assert greedy(client, [7, 8, 9], 4)["meta_info"]["completion_tokens"] == 4


def test_router_sends_to_a_registered_engine(tiny_engine, tiny_engine_args, client):
    router = SGLangRouter(tiny_engine_args.replace(router={"policy": "round_robin"}))
    router.start()
    try:
        router.add(tiny_engine.url)
        with EngineClient(router.url) as through, router.client() as workers:
            assert workers.workers() == {tiny_engine.url: True}
            assert greedy(through, [3, 4, 5], 5)["output_ids"] == greedy(client, [3, 4, 5], 5)["output_ids"]
            with pytest.raises(RouterError, match="did not become a healthy worker"):
                workers.add(f"http://127.0.0.1:{free_port()}", timeout=1.0)
            workers.remove(tiny_engine.url)
            assert tiny_engine.url not in workers.workers()
            workers.remove(tiny_engine.url)  # not there: nothing to do
        url = router.url
        psutil.Process(router.pids()[-1]).kill()
        wait_until_dead = time.monotonic() + 30
        while router.is_alive():
            assert time.monotonic() < wait_until_dead
            time.sleep(0.05)
        assert "router ended with status" in router.failure()
        router.restart()
        router.add(tiny_engine.url)
        with EngineClient(url) as through:
            assert greedy(through, [3, 4, 5], 5)["output_ids"] == greedy(client, [3, 4, 5], 5)["output_ids"]
        pids = router.pids()
    finally:
        router.stop()
    assert len(pids) >= 2 and not any(psutil.pid_exists(pid) for pid in pids)


def test_port_in_use_is_told_before_anything_starts(tiny_engine, tiny_engine_args):
    server = SGLangServer(tiny_engine_args, EngineSpec.from_args(tiny_engine_args, 1), port=tiny_engine.port)
    with pytest.raises(RuntimeError, match=f"engine 1: port {tiny_engine.port} on 127.0.0.1 is in use"):
        server.start()
    router = SGLangRouter(tiny_engine_args.replace(sglang_router_port=tiny_engine.port))
    with pytest.raises(RuntimeError, match=f"--sglang-router-port {tiny_engine.port}"):
        router.start()


def test_killed_owner_leaves_no_engine(tiny_engine_args, tmp_path):
    code = textwrap.dedent(f"""
        import pickle, sys, time
        from slime.backends.sglang_utils.engine_actor import SGLangEngineActor
        args = pickle.loads({pickle.dumps(tiny_engine_args.replace(run_dir=str(tmp_path)))!r})
        actor = SGLangEngineActor(args)
        actor.start(wait=False)
        time.sleep(900)
    """)
    owner = subprocess.Popen([sys.executable, "-c", code])
    try:
        # As soon as the scheduler and the detokenizer are being spawned.
        wait_for(lambda: len(psutil.Process(owner.pid).children(recursive=True)) >= 4)
        tree = [p.pid for p in psutil.Process(owner.pid).children(recursive=True)]
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in tree), 60)


def test_failed_start_is_one_clear_error(tiny_engine_args, tmp_path):
    args = tiny_engine_args.replace(run_dir=str(tmp_path), sglang={"attention_backend": "no_such_backend"})
    server = SGLangServer(args, EngineSpec.from_args(args, 2))
    with pytest.raises(RuntimeError) as error:
        server.start()
    first, log, *_ = str(error.value).splitlines()
    assert first.startswith("engine 2 ended with status 2 before it was ready") and "no_such_backend" in first
    assert str(tmp_path / "logs" / "engine_2.log") in log
    assert not server.is_alive()
