"""Weights from a TP 2 x PP 2 trainer into a real SGLang engine: digests, log-probs, refusals, engines that die."""

import os
import re
import signal
import threading
import time

import pytest
import torch
from ranks import run_ranks
from test_weights_megatron import TOKENS, build, make_args, model_folder

from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint

pytestmark = pytest.mark.engine


def start_server(folder, log):
    from slime.backends.sglang_utils.server import EngineSpec, SGLangServer

    args = make_args(folder, 1, 1, 1, rollout_max_context_len=128, sglang_server_concurrency=4)
    server = SGLangServer(args, EngineSpec.from_args(args), log_path=log)
    server.start()
    return server


@pytest.fixture
def served(tiny_engine, tiny_model):
    """(URL of the session's engine, folder of its model); afterwards the engine has the folder's weights again."""
    yield tiny_engine.url, tiny_model
    with EngineClient(tiny_engine.url) as client:
        client.update_weights_from_disk(str(tiny_model))


def engine_log_probs(url, tokens):
    """Log-prob of every token but the first, and the weight version that the engine names."""
    with EngineClient(url) as client:
        reply = client.generate(
            input_ids=tokens,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
    info = reply["meta_info"]
    return torch.tensor([row[0] for row in info["input_token_logprobs"][1:]]), info["weight_version"]


def reference_log_probs(folder, tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def change(chunks, seed):
    """Other weights: the same on every replica, different in every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in chunks:
        for parameter in chunk.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.data.add_(0.02 * noise.to(parameter.dtype))


def tie_again(chunks):
    """The last stage's copy of a tied embedding is what the first stage has, as Megatron keeps it in training."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    if mpu.is_rank_in_embedding_group() and mpu.get_pipeline_model_parallel_world_size() > 1:
        weight = chunks[0].shared_embedding_or_output_weight().data
        dist.broadcast(
            weight, dist.get_process_group_ranks(mpu.get_embedding_group())[0], group=mpu.get_embedding_group()
        )


def push_changed_weights(rank, world, port, args, urls, out):
    """Twice over one connection, over a second one, and by shared memory."""
    from slime.backends.megatron_utils.update_weight import WeightUpdater
    from slime.models import save_hf

    chunks, hf = build(args, rank, world, port)
    updater = WeightUpdater(args, chunks, hf)
    updater.connect([EngineEndpoint(url, 1, i + 1) for i, url in enumerate(urls)])
    first = updater.update(0)
    change(chunks, seed=rank)
    tie_again(chunks)
    receipt = updater.update(7)
    updater.connect([EngineEndpoint(url, 1, i + 1) for i, url in enumerate(urls)])  # as after a restart of an engine
    again = updater.update(8)

    shared = WeightUpdater(args.replace(update_weight_mode="tensor"), chunks, hf)  # as colocated engines on GPUs
    shared.connect([EngineEndpoint(url, 1, i + 1) for i, url in enumerate(urls)])
    change(chunks, seed=100 + rank)
    tie_again(chunks)
    handed_over = shared.update(9)
    save_hf(chunks, out, hf, args)
    return first, receipt, again, handed_over


def test_changed_weights_arrive_byte_by_byte(served, tmp_path):
    url, folder = served
    args = make_args(
        folder, 4, 2, 2, update_weight_buffer_size=60_000, check_weights_interval=1, sequence_parallel=True
    )
    receipts = run_ranks(4, push_changed_weights, args, [url], tmp_path / "hf")
    first, second, third, _ = receipts[0]
    assert receipts[1:] == [(None,) * 4] * 3
    for receipt in receipts[0]:
        # 11 tensors a layer, embedding and final norm; the engine has 8 a layer after fusing.
        assert (receipt.tensors, receipt.digests_checked, receipt.digests_ok) == (24, 18, True)
        assert receipt.bytes == sum(p.numel() for p in _parameters(folder)) * 4 and receipt.gb_per_s > 0
    assert (first.changed, second.changed, third.changed) == (None, 18, None)  # a new connection starts afresh
    for tokens in TOKENS:
        ours, version = engine_log_probs(url, tokens)
        assert version == "9"
        torch.testing.assert_close(ours, reference_log_probs(tmp_path / "hf", tokens), rtol=0, atol=1e-4)
        assert (ours - reference_log_probs(folder, tokens)).abs().max() > 0.01  # they are not the old weights


def _parameters(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).parameters()


# -- failures -------------------------------------------------------------------------------------------------------


def failing_update(updater, version):
    """The error of an update that must fail, and the seconds until it was there."""
    from slime.backends.megatron_utils.update_weight import WeightSyncError

    started = time.monotonic()
    try:
        updater.update(version)
    except WeightSyncError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the update did not fail")


def meet_failures(rank, world, port, args, url, pids, restarted):
    """Refused, falsified, killed: each time both stages learn it soon, and the next connection works again."""
    from slime.backends.megatron_utils.update_weight import WeightUpdater
    from slime.backends.megatron_utils.update_weight import updater as module
    from slime.backends.megatron_utils.update_weight.engine_group import EngineGroup

    chunks, hf = build(args, rank, world, port)
    updater = WeightUpdater(args, chunks, hf)
    engines = [EngineEndpoint(url)]
    updater.connect(engines)
    out = {}

    plain_begin, module._begin = module._begin, lambda client: None  # an update outside of a session is refused
    out["refused"] = failing_update(updater, 1)
    module._begin = plain_begin
    updater.connect(engines)
    out["after refusal"] = updater.update(2)

    plain_broadcast = EngineGroup.broadcast

    def flip_a_bit(group, data, *more):
        data = data.clone()
        data[5] ^= 1
        plain_broadcast(group, data, *more)

    if rank == 1:  # the second stage's first tensor arrives wrong
        EngineGroup.broadcast = flip_a_bit
    out["falsified"] = failing_update(updater, 3)
    EngineGroup.broadcast = plain_broadcast
    updater.connect(engines)
    out["after falsification"] = updater.update(4)

    def kill_while_sending(group, *sent):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        plain_broadcast(group, *sent)

    EngineGroup.broadcast = kill_while_sending
    out["killed"] = failing_update(updater, 5)
    EngineGroup.broadcast = plain_broadcast
    deadline = time.monotonic() + 500
    while not restarted.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert restarted.exists(), "the engine was not restarted in time"
    updater.connect([EngineEndpoint(restarted.read_text())])  # perhaps on another port
    out["after restart"] = updater.update(6)
    return out


def test_failures_reach_every_rank_and_are_survived(tmp_path_factory):
    """The vocabulary is large, so that a broadcast nobody receives does not fit into the sockets' buffers."""
    tmp_path = tmp_path_factory.mktemp("faults")
    folder = model_folder(tmp_path / "llama", "llama", tied=False, vocab_size=30_000, hidden_size=136, num_layers=2)
    args = make_args(folder, 2, 1, 2, update_weight_timeout=60.0, check_weights_interval=1)
    server = start_server(folder, tmp_path / "engine.log")
    restarted = tmp_path / "restarted"
    try:
        helper = threading.Thread(target=restart_when_dead, args=(server, restarted), daemon=True)
        helper.start()
        first, second = run_ranks(2, meet_failures, args, server.url, server.pids(), restarted, timeout=900)
        helper.join(timeout=5)
        _, version = engine_log_probs(server.url, TOKENS[0])
    finally:
        server.stop()
    words = {
        "refused": "sending pipeline stage 0: .*update_weights_from_distributed: HTTP 400: .*must run between",
        "falsified": "checking the engines' weights: 1 of 15 parameters differ.*\n"
        ".*rank 0 model.layers.1.input_layernorm.weight: trainer [0-9a-f]{16}, engine [0-9a-f]{16}",
        "killed": "sending pipeline stage 0: ",
    }
    for event, pattern in words.items():
        assert re.match(pattern, first[event][0]), first[event]
        assert first[event][0] == second[event][0]  # the same words on every rank
        assert max(first[event][1], second[event][1]) < 30, (event, first[event][1], second[event][1])
    for event in "after refusal", "after falsification", "after restart":
        assert first[event].digests_checked == 15 and second[event] is None
    assert version == "6"


def restart_when_dead(server, done):
    while server.is_alive():
        time.sleep(0.2)
    server.start()
    done.with_suffix(".part").write_text(server.url)
    done.with_suffix(".part").rename(done)
