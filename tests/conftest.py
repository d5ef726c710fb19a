"""Fixtures that several test files share: one tiny model and one real engine for the whole session."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tools`


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """For `pytest -n 2`: files stay together, and those that need an engine go to one worker, so to one engine."""
    from xdist.scheduler import LoadScopeScheduling

    folder = Path(__file__).parent
    engine = {f.name for f in folder.glob("test_*.py") if "pytest.mark.engine" in f.read_text()}

    class OneEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0].rpartition("/")[2]
            return "engine" if file in engine else file

    return OneEngine(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a random Qwen3 with tied embeddings. Its vocabulary and MLP are no multiples of what SGLang pads to."""
    from tools.make_tiny_model import TinyModel, make_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny-qwen3"
    sizes = dict(hidden_size=72, num_attention_heads=8, num_key_value_heads=4, head_dim=10, intermediate_size=104)
    make_tiny_model(folder, TinyModel(vocab_size=331, tie_word_embeddings=True, max_position_embeddings=256, **sizes))
    return folder


@pytest.fixture(scope="session")
def tiny_engine_args(tiny_model, tmp_path_factory):
    """Args that the session's engine runs with: float32 on CPU, 128 tokens of context."""
    from slime.config import Args

    return Args(
        device="cpu",
        hf_checkpoint=str(tiny_model),
        params_dtype="float32",
        rollout_num_gpus=1,
        rollout_max_context_len=128,
        sglang_start_timeout=570.0,
        run_dir=str(tmp_path_factory.mktemp("run")),
    )


@pytest.fixture(scope="session")
def tiny_engine(tiny_engine_args):
    """The session's `SGLangServer`, started once. Tests leave it serving; those that break engines start their own."""
    from slime.backends.sglang_utils.server import EngineSpec, SGLangServer

    server = SGLangServer(tiny_engine_args, EngineSpec.from_args(tiny_engine_args))
    server.start()
    yield server
    server.stop()
