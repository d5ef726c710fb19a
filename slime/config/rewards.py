"""What --rm-type, and "rm_type" in a row's metadata, may name. The rewards themselves are in slime/rollout/rm_hub."""

# tests/test_config.py holds it to slime.rollout.rm_hub.RM_TYPES.
BUILT_IN_REWARDS = ("math", "exact", "f1", "reasoning_gym", "remote_rm", "deepscaler", "dapo", "random")
WITHOUT_LABEL = ("remote_rm", "reasoning_gym", "random")  # those that can grade a sample that has none
