"""Flags: precedence, unknown names, derivation, and one clear line for each impossible combination."""

import json
import pickle

import pytest

from slime.config import Args, ConfigError, foreign, load_args, make_layout
from slime.config.hooks import check_hooks
from slime.config.parse import build_parser, parse_args
from slime.config.rewards import BUILT_IN_REWARDS
from slime.config.validate import check_limits
from slime.utils.resume import check_start

SFT = ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"]
PPO, OPD = ["--advantage-estimator", "ppo"], ["--advantage-estimator", "on_policy_distillation"]
TINY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 24,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "vocab_size": 97,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return folder


@pytest.fixture
def base(model):
    return [
        "--device", "cpu", "--hf-checkpoint", str(model), "--prompt-data", str(model.parent / "p.jsonl"),
        "--rm-type", "exact", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2",
        "--rollout-max-response-len", "16",
    ]  # fmt: skip


def test_command_line_wins_over_yaml_over_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "lr: 1.0e-4\neps-clip: 0.1\nsave_samples: false\nrollout_stop: [a, b]\nsglang_mem_fraction_static: 0.5\n"
    )
    args = parse_args(["--config", str(file), "--eps-clip", "0.3"])
    assert (args.lr, args.eps_clip, args.save_samples, args.rollout_stop) == (1e-4, 0.3, False, ["a", "b"])
    assert args.eps_clip_high == 0.28 and args.sglang == {"mem_fraction_static": "0.5"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n-sample-per-prompt", "3"], "did you mean --n-samples-per-prompt"),
        (["--eps-cli", "0.1"], "unknown flag --eps-cli; did you mean --eps-clip"),  # no abbreviations
        (["--sglang-mem-fraction", "0.8"], "did you mean --sglang-mem-fraction-static"),
        (["--router-polisy", "random"], "did you mean --router-policy"),
        (["--bf16"], "unknown flag --bf16: give --params-dtype"),
        (["--use-wandb"], "unknown flag --use-wandb: metrics go to TensorBoard"),
        (["stray"], "'stray' belongs to no flag"),
        (["trainer.nnodes=2"], "is no flag: flags are --name value"),
        (["-tp", "2"], "unknown flag -tp: .* did you mean --tp"),
        (["--colocate", "true"], "'true' belongs to no flag: a switch takes no value"),
        (["--sglang-enable-metrics", "--colocate", "false"], "'false' belongs to no flag"),  # not the engine's value
        (
            ["--pretrain", "m", "--sglang-x-y", "1", "--zero", "3"],
            "--pretrain: give --hf-checkpoint\nunknown flag --zero; .*\nunknown flag --sglang-x-y",
        ),
        (["--lr", "fast"], "invalid float value: 'fast'"),
        (["--loss-type", "nope"], "invalid choice: 'nope'"),
    ],
)
def test_what_cannot_be_parsed_says_so(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse_args(argv)


def test_unknown_yaml_key_and_broken_yaml(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 1\n")
    with pytest.raises(ConfigError, match="unknown key 'learning_rate'"):
        parse_args(["--config", str(file)])
    file.write_text("- a list\n")
    with pytest.raises(ConfigError, match="must hold `name: value` lines"):
        parse_args(["--config", str(file)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2\n", "the key 'lr' is there twice"),
        ("n-samples-per-prompt: 1\nn_samples_per_prompt: 2\n", "'n_samples_per_prompt' is there twice"),
        ("tp: 1\ntensor_model_parallel_size: 2\n", "'tp' and 'tensor_model_parallel_size' are the same flag"),
        ("config: other.yaml\n", "cannot name another"),
        ("lr: true\n", "lr: True is a bool; needed: FLOAT"),
        ("lr: [1, 2]\n", "is a list; needed: FLOAT"),
        ("lr:\n  peak: 1\n", "is a dict; needed: FLOAT"),
        ("colocate: 'false'\n", "needed: true or false"),
        ("lr: fast\n", "invalid float value: 'fast'"),
        ("rollout_stop: [a, null]\n", "rollout_stop: None is a NoneType; needed are texts or numbers"),
        ("rollout_stop: [yes]\n", "rollout_stop: True is a bool"),
        ("rollout_stop: [a, --b]\n", "begins with a dash can be given alone only"),
        ("bf16: true\n", "unknown key 'bf16': give --params-dtype bfloat16"),
        ("lr: [\n", "cannot be read"),
        (b"lr: \xff\n", "cannot be read"),
    ],
)
def test_a_file_of_flags_with_wrong_lines_says_so(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        parse_args(["--config", str(file)])


def test_a_file_of_flags_may_be_empty_and_say_off_without_quotes(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert parse_args(["--config", str(file)]).lr == 1e-6
    file.write_text("progress: off\nrounding_profile: off\ncolocate: on\napply_chat_template_kwargs: {a: 1}\n")
    args = parse_args(["--config", str(file)])
    assert (args.progress, args.rounding_profile, args.colocate) == ("off", "off", True)
    assert args.apply_chat_template_kwargs == {"a": 1}
    file.write_text("sglang_enable_metrics: false\nno_rollout_shuffle: false\nrollout_stop: ['---']\n")
    args = parse_args(["--config", str(file)])
    assert (args.sglang, args.rollout_shuffle, args.rollout_stop) == ({"enable_metrics": "false"}, True, ["---"])


def test_no_flag_that_is_there_has_advice_against_it():
    known = {s.removeprefix("--") for action in build_parser()._actions for s in action.option_strings}
    assert not known & set(foreign._ADVICE)


def test_keys_of_the_users_own_file_are_attributes(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("my_weight: 0.5\n")
    args = parse_args(["--custom-config-path", str(file)]).freeze()
    assert args.my_weight == 0.5 and "my_weight" in args
    assert pickle.loads(pickle.dumps(args)).my_weight == 0.5
    with pytest.raises(AttributeError, match="read-only"):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="neither a flag nor a key"):
        _ = args.my_weigth
    file.write_text("replace: 0.5\n")
    with pytest.raises(ConfigError, match="args.replace is a method"):
        parse_args(["--custom-config-path", str(file)])
    file.write_text("lr: 0.5\n")
    with pytest.raises(ConfigError, match="'lr' is a flag"):
        parse_args(["--custom-config-path", str(file)])


def test_every_flag_is_in_help():
    text = build_parser().format_help()
    for name in Args():
        if name not in ("extra", "sglang", "router"):
            assert "--" + name.replace("_", "-") in text


def test_derived_layout(base):
    args = load_args([*base, "--tp", "2", "--pp", "2", "--num-steps-per-rollout", "3"])
    layout = make_layout(args)
    assert (layout.world_size, layout.dp, layout.num_engines, layout.total_ranks) == (4, 1, 1, 5)
    assert (layout.global_batch_size, layout.steps_per_rollout, layout.last_step_samples) == (3, 3, 2)
    assert args.rollout_max_context_len == 128 and args.rollout_max_prompt_len == 127
    assert args.eps_clip_high == 0.28 and args.check_weights_interval == 1


def test_layout_of_a_critic(base):
    args = load_args([*base, *PPO, "--tp", "2", "--critic-num-gpus-per-node", "4"])
    layout = make_layout(args)
    assert (layout.world_size, layout.critic_world_size, layout.dp, layout.critic_dp) == (2, 4, 1, 2)
    assert layout.trained_devices == 6 and layout.total_ranks == layout.processes == 7
    assert args.critic_lr == args.lr
    layout = make_layout(load_args([*base, *PPO, "--actor-num-gpus-per-node", "2", "--colocate-critic"]))
    assert (layout.critic_dp, layout.trained_devices, layout.total_ranks, layout.processes) == (2, 2, 3, 5)
    assert make_layout(load_args(base)).critic_world_size == make_layout(load_args(base)).critic_dp == 0


def test_what_public_scripts_for_gpus_give_runs_on_a_laptop(base):
    script = (
        "--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2 "
        "--eps-clip-high 0.28 --tensor-model-parallel-size 1 --sequence-parallel --context-parallel-size 1 "
        "--expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --use-dynamic-batch-size --optimizer adam --lr-decay-style constant "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 --attention-backend flash --sglang-mem-fraction-static 0.7"
    )
    args = load_args([*base, *script.split()])
    assert args.use_kl_loss and not args.sequence_parallel


def test_engines_on_cpu_pad_heads_that_they_do_not_divide(base):
    engines = ["--rollout-num-gpus-per-engine", "4", "--rollout-num-gpus", "4"]
    assert make_layout(load_args([*base, *engines])).engine_tp == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tp", "4"], "does not divide the model's num_attention_heads 6"),
        (["--tp", "3"], "does not divide the model's num_key_value_heads 2, and is no multiple of it"),
        (["--pp", "3"], "does not divide the model's 4 layers"),
        (["--tp", "2", "--actor-num-gpus-per-node", "3"], "no multiple of TP 2"),
        (["--ep", "2"], "the model has no experts"),
        (["--overlap-param-gather"], "needs --overlap-grad-reduce and --use-distributed-optimizer"),
        (["--device", "cuda", "--rollout-num-gpus-per-engine", "4"], "per-engine 4 does not divide the model's"),
        (["--device", "cuda", "--actor-num-gpus-per-node", "16"], "is more than a node has .--num-gpus-per-node 8"),
        (["--allgather-cp"], "needs --context-parallel-size of 2 or more"),
        (["--cp", "2", "--allgather-cp", "--transformer-impl", "transformer_engine"], "knows the zigzag cut only"),
        (["--rollout-max-response-len", "128"], "leaves no room for a prompt"),
        (["--rollout-max-context-len", "4096"], "over the model's max_position_embeddings 128"),
        (["--global-batch-size", "9"], "more than a rollout yields"),
        (["--over-sampling-batch-size", "2"], "below --rollout-batch-size"),
        (["--num-steps-per-rollout", "9"], "more than the 8 samples"),
        (["--kl-loss-coef", "0.1"], "no effect without --use-kl-loss"),
        (["--kl-coef", "0.1"], "no effect with --advantage-estimator grpo"),
        (["--eps-clip-c", "0.9"], "must be above 1"),
        (["--eps-clip-c", "3", "--advantage-estimator", "cispo"], "no effect with --advantage-estimator cispo"),
        ([*OPD, "--opd-teacher-load", ".", "--distill-topk", "4", "--eps-clip-c", "3"], "no importance ratio"),
        (
            ["--disable-grpo-std-normalization", "--advantage-estimator", "rloo"],
            "without .* grpo, gspo, cispo",
        ),
        (["--disable-grpo-std-normalization", "--disable-rewards-normalization"], "not with --disable-rewards"),
        (["--transformer-impl", "transformer_engine"], "runs on CUDA only"),
        (
            ["--rollout-stop-token-ids", "96", "97", "-1"],
            "ids 97 -1: no token .* vocabulary is 0 to 96",
        ),
        (["--n-samples-per-prompt", "1"], "every advantage is 0"),
        (["--loss-type", "custom_loss"], "needs --custom-loss-path"),
        (["--rm-type", "remote_rm"], "needs --rm-url"),
        (["--rollout-temperature", "0"], "must be above 0"),
        (["--rollout-batch-size", "0"], "it must be at least 1"),
        (["--hf-checkpoint", "nowhere"], "--hf-checkpoint nowhere: no such folder"),
        (["--update-weights-interval", "2"], "has no effect: train.py sends the weights after every rollout"),
        (["--eval-interval", "2"], "needs --eval-prompt-data"),
        (["--use-tis", "--use-rollout-logprobs"], "choose one"),
        (["--sglang-tp-size", "2"], "use --rollout-num-gpus-per-engine"),
        (["--router-port", "3000"], "use --sglang-router-port"),
        (["--eval-max-context-len", "129"], "is over --rollout-max-context-len 128"),
        (["--num-layers", "36"], "the model has 4 "),
        (["--rotary-base", "10000"], "the model has 12345.0 "),
        (["--loss-type", "value_loss"], "is the critic's own"),
        (["--critic-load", "x"], "no effect: there is no critic"),
        (["--num-critic-only-steps", "1"], "no effect: there is no critic"),
        (["--colocate-critic"], "no effect: there is no critic"),
        ([*PPO, "--num-critic-only-steps", "3"], "the actor would never train"),
        ([*PPO, "--tp", "2", "--critic-num-gpus-per-node", "3"], "3 critic ranks .* no multiple of TP x PP x CP = 2"),
        ([*PPO, "--colocate-critic", "--critic-num-gpus-per-node", "2"], "the critic has 2 ranks, the actor only 1"),
        ([*PPO, "--value-clip", "0"], "must be above 0"),
        ([*PPO, "--lambd", "1.5"], "must be in \\[0, 1\\]"),
        (["--advantage-estimator", "maxrl", "--rm-type", "dapo"], "needs rewards in \\[0, 1\\]"),
        (["--tis-mode", "mask"], "have no effect without --use-tis"),
        (["--use-tis", "--tis-veto", "2"], "must be in .0, 1."),
        (["--use-tis", "--tis-clip-low", "3"], "needed 0 <= low <= high"),
        (["--opsm-delta", "-1"], "must be at least 0"),
        (OPD, "needs a teacher"),
        (["--opd-kl-coef", "0.1"], "needs a teacher"),
        ([*OPD, "--opd-teacher-load", ".", "--opd-teacher-url", "http://x/generate"], "two teachers"),
        (["--opd-teacher-load", "."], "a teacher has no effect"),
        ([*OPD, "--opd-teacher-load", ".", "--opd-kl-coef", "1"], "nothing else already"),
        ([*OPD, "--opd-teacher-url", "http://x/generate", "--rollout-temperature", "0.6"], "taken for a lesson"),
        (["--distill-topk", "4"], "no effect without --advantage-estimator on_policy_distillation or --opd-kl-coef"),
        ([*OPD, "--opd-teacher-load", ".", "--distill-topk", "0"], "must be from 1 to the vocabulary of"),
        ([*OPD, "--opd-teacher-load", ".", "--distill-topk", "4", "--use-tis"], "has no importance ratio"),
        (["--use-opsm"], "no effect with one optimizer step per rollout"),
        (["--use-rollout-logprobs", *SFT], "--use-rollout-logprobs needs the engine's log-probs"),
    ],
)
def test_impossible_combinations_are_refused(base, more, message):
    with pytest.raises(ConfigError, match=message):
        load_args([*base, *more])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(quantization_config={"quant_method": "fp8"}), "is quantised: engines would keep quantised weights"),
        (dict(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8, mlp_only_layers=[1]),
         "layers 1 have no experts, but SGLang gives every layer of a qwen3_moe experts"),
    ],
)  # fmt: skip
def test_models_that_engines_would_hold_otherwise_are_refused(base, tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    with pytest.raises(ConfigError, match=message):
        load_args([*base, "--hf-checkpoint", str(tmp_path)])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lr", "nan"], "--lr is nan: it must be a finite number"),
        (["--eps-clip-high", "inf"], "must be a finite number"),
        (["--adam-beta1", "1"], r"must be in \[0, 1\)"),
        (["--rollout-top-p", "0"], r"must be in \(0, 1\]"),
        (["--clip-grad", "-1"], "must be at least 0"),
        (["--rm-timeout", "0"], "must be above 0"),
        (["--num-steps-per-rollout", "0"], "must be at least 1"),
        (["--save-interval", "0"], "leave it out to turn it off"),
        (["--actor-num-nodes", "0"], "--actor-num-nodes is 0: it must be at least 1"),
        (["--pp", "2", "--num-layers-per-virtual-pipeline-stage", "0"], "must be at least 1"),
    ],
)
def test_numbers_outside_of_their_limits_are_refused_before_anything_is_derived_from_them(base, more, message):
    with pytest.raises(ConfigError, match=message):
        load_args([*base, *more])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-steps-per-rollout", "4", "--global-batch-size", "4"], "makes 2 of 8 samples a step"),
        (["--micro-batch-size", "4"], "give --no-use-dynamic-batch-size"),
        (["--lr-warmup-iters", "1", "--lr-warmup-fraction", "0.1"], "choose one"),
        (["--lr-decay-style", "cosine", "--lr-warmup-iters", "3"], "does not end before the 3 steps"),
        (["--min-lr", "1", "--lr-decay-style", "cosine"], "it is above --lr"),
        (["--min-lr", "1e-7"], "a constant learning rate has no decay"),
        (["--num-epoch", "2"], "no effect: --num-rollout 3 is given"),
        (
            ["--device", "cuda", "--transformer-impl", "local", "--attention-backend", "flash"],
            "--attention-backend flash",
        ),
        (["--start-rollout-id", "3"], "leaves nothing to do: rollouts are 0 to 2"),
        (["--debug-train-only"], "starts no engine to generate with: give --load-debug-rollout-data"),
        (["--sglang-data-parallel-size", "2"], "--sglang-dp-size 2 without --sglang-enable-dp-attention"),
        (["--sglang-pp-size", "2"], "cannot be given"),
        (
            ["--eval-interval", "1", "--eval-prompt-data", "a", "f", "--eval-max-response-len", "128"],
            "--eval-max-response-len 128 leaves no room for a prompt",
        ),
        (["--recompute-granularity", "full"], "needs --recompute-method and --recompute-num-layers"),
        (["--recompute-num-layers", "1"], "no effect without --recompute-granularity full"),
        (["--rm-type", "maths"], "--rm-type maths is unknown; built in are math"),
        (["--rm-type", "dapo"], "give --reward-key score"),
        (["--rm-type", "remote_rm", "--rm-url", "host/x"], "begins with http://"),
        (["--group-rm"], "no effect without --custom-rm-path"),
        (["--eval-prompt-data", "a", "f"], "no effect without --eval-interval"),
        (["--eval-interval", "1", "--eval-prompt-data", "a", "f", "a", "g"], "names must differ"),
        (["--save-interval", "2"], "no effect without --save"),
        (["--finetune"], "no effect without --load"),
        (["--ref-load", "."], "no effect without --use-kl-loss or --kl-coef; the first weights are"),
        (["--gamma", "0.9"], "no effect without --advantage-estimator ppo or reinforce_plus_plus"),
        (["--tis-clip", "3"], "no effect without --use-tis"),
        (["--mask-offpolicy-in-partial-rollout"], "no effect without --partial-rollout"),
        (["--custom-loss-path", "m.f", "--loss-type", "sft_loss"], "are two losses"),
        (["--loss-type", "sft_loss", "--n-samples-per-prompt", "1"], "give --rollout-function-path"),
        (SFT, "its samples have no reward"),
        (["--sglang-router-ip", "1.2.3.4"], "needs --sglang-router-port"),
        (["--rollout-top-k", "0"], "or -1 for all tokens"),
        (["--rollout-stop", ""], "each would end at once"),
        (["--rollout-max-prompt-len", "128"], "leaves no room for a response in a context of 128"),
        (["--save", ""], "--save is empty"),
        (["--sglang-mem-fraction-static"], "--sglang-mem-fraction-static needs a value"),
        (["--sglang-mem-fraction-static", "80%"], "--sglang-mem-fraction-static 80%: it must be a number"),
        (["--sglang-max-running-requests", "0.5"], "it must be a whole number"),
        (["--sglang-max-running-requests", "1", "2"], "takes one value, not 1 2"),
        (["--sglang-schedule-policy", "lifo"], "--sglang-schedule-policy lifo: it must be one of lpm, random, fcfs"),
        (["--router-policy", "best"], "--router-policy best: it must be one of random, round_robin"),
        (["--sglang-enable-metrics", "maybe"], "--sglang-enable-metrics is on or off"),
        (
            [*SFT, "--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--entropy-coef", "0.1"],
            "--entropy-coef has no effect without --loss-type policy_loss",
        ),
        (["--apply-chat-template-kwargs", "[1]"], "is no JSON object"),
        (["--update-weight-mode", "tensor"], "it needs --colocate"),
    ],
)
def test_flags_that_contradict_or_that_nothing_would_read_are_refused(base, more, message):
    with pytest.raises(ConfigError, match=message):
        load_args([*base, *more])


def test_built_in_rewards_are_those_of_the_hub():
    from slime.rollout.rm_hub import RM_TYPES

    assert set(BUILT_IN_REWARDS) == set(RM_TYPES)


def test_what_would_be_replaced_or_cannot_be_found_is_refused_before_start(base, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")

    def refused(message, *more):
        with pytest.raises(ConfigError, match=message):
            check_start(load_args([*base, "--run-dir", str(tmp_path / "run"), *more]))

    refused("the folder holds other files, which would be lost", "--save-hf", str(tmp_path / "mine"))
    refused("would replace --hf-checkpoint", "--save-hf", str(tmp_path / "model"))
    refused("would replace --hf-checkpoint", "--save-hf", str(tmp_path))
    refused("each rollout would replace", "--save-debug-rollout-data", str(tmp_path / "x.pt"))
    refused("only {rollout_id} is filled in", "--save-debug-rollout-data", str(tmp_path / "{step}.pt"))
    refused("there is no .*/0.pt", "--load-debug-rollout-data", str(tmp_path / "{rollout_id}.pt"))


def test_a_hook_whose_module_exits_is_a_fault_of_the_hook(base, tmp_path, monkeypatch):
    (tmp_path / "script_without_guard.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="importing it failed with SystemExit: 3"):
        check_hooks(load_args([*base, "--custom-rm-path", "script_without_guard.reward"]))


def test_every_default_is_within_its_limits():
    check_limits(Args())


def test_megatrons_size_flags_are_taken_where_they_agree(base):
    sizes = ["--num-layers", "4", "--rotary-base", "12345", "--swiglu", "--normalization", "RMSNorm"]
    more = ["--num-attention-heads", "6", "--attention-dropout", "0.0", "--optimizer", "adam", "--qk-layernorm"]
    assert load_args([*base, *sizes, *more]).num_layers == 4
