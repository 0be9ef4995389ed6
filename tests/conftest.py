"""Which tests run in the fast suite: the others are marked slow, and `scripts/test.sh --slow` runs them, too."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # tests/gpu do without
    from hypothesis import settings

    # An example may take longer than 200 ms where the machine is busy, which is no reason to fail.
    settings.register_profile("unhurried", settings(), deadline=None)
    settings.load_profile("unhurried")

# Of tests/dist, by file: every test, or those whose id has one of these words.
FAST_DIST: dict[str, tuple[str, ...]] = {
    "test_checkpoint_bugs.py": ("",),
    "test_checkpoint_resume.py": ("to_the_bit[tp2]", "to_the_bit[disjoint-llm-dp2]", "continues[llm-tp2]",
                                  "continues[from-colocated-to-disjoint]"),
    "test_checkpoint_strict.py": ("every_deleted", "every_corrupted_item", "no_code"),
    "test_deepseek.py": ("hugging_face[yarn",),
    "test_dynamic_resolution.py": ("both_pipelines", "1-encoder"),
    "test_encoder_prefetch.py": ("changes[fan-in]", "changes[encoder-tp2]"),
    "test_equality.py": ("the_batch_is_mixed", "dense-encoder-dp1-llm-dp2", "dense-encoder-tp2", "moe-llm-ep2",
                         "moe-encoder-pp2-llm-pp2", "dense-colocated-encoder-dp2"),
    "test_flops.py": ("as_much[llava]", "as_much[nemotron]", "router"),
    "test_hf_families.py": ("llama", "tied"),
    "test_language_model.py": ("",),
    "test_mtp.py": ("pytorch[two-depths-pp2]", "pytorch[packed-tp2]", "label_of", "reports", "unread"),
    "test_mamba_mixer.py": ("",),
    "test_nemotron.py": ("one_process[ep2-tp2]", "one_process[pp2]"),
    "test_nemotron_h.py": ("",),
    "test_offload.py": ("[disjoint-overlap-bf16]", "says_so"),
    "test_packed_attention.py": ("positions",),
    "test_radio.py": ("published", "norms_names", "to_the_bit"),
    "test_recorded_bugs.py": ("test_bug_6", "test_bug_7", "test_bug_8", "test_bug_9", "test_bug_10", "test_bug_22",
                              "every_layout[llm-tp2]", "test_bug_28", "test_bug_29"),
    "test_rl_logprobs.py": ("columns", "[dp2-ppo]", "[five-microbatches-gspo]", "[tp2-cispo]", "left_padding"),
    "test_refit_disk.py": ("an_export_writes[text", "leaves_nothing"),
    "test_rl_reference.py": ("no_bit[dp2-ep2",),
    "test_rl_images.py": ("[fan-out]",),
    "test_rl_policy.py": ("moves_the_policy", "[dp2-ep2]"),
    "test_refit_holdings.py": ("",),
    "test_refit.py": ("moe-tp2-ep2",),
    "test_routed_lanes.py": ("",),
    "test_timeline.py": ("slow_encoder",),
    "test_single_model_checkpoint.py": ("is_named_on_every_rank", "one_error"),
}
# Elsewhere: long tests of what others touch, too.
SLOW = (
    "test_quickstart.py::test_seeds_repeat_and_matter", "test_export_of_a_model_that_moved", "test_a_full_disk[shard",
    "test_verify_names_what_is_damaged", "test_killed_between_a_name",
    "test_a_run_restored_within_a_buffer", "test_bench_loader.py", "test_bench_checkpoint.py",
    "test_data_stats.py::test_the_page", "test_served_sizes.py", "test_every_image_is_decoded_once",
    "e2e/test_stall.py",
    "test_inspect_tells_what", "test_inspect_names_what_differs",
    "e2e/test_parity.py", "e2e/test_bench_train.py", "test_both_arms_run",
    "e2e/test_run_folder.py", "test_a_folder_that_cannot_be_written_is_refused_at_the_start",
    "test_workers_of_several_lanes_read_on_after_any_row", "own_loader_of_each_lane_reads[2-4-1]",
    "own_loader_of_each_lane_reads[1-3-1]", "own_loader_of_each_lane_reads[1-1-3]", "lose_and_repeat_nothing[49",
    "test_a_pack_without_a_decodable_image", "at_once_and_after_a_few_rows[1-", "test_lanes_that_are_not_neighbours",
    "own_loader_of_each_lane_reads[1-2-", "lose_and_repeat_nothing[3-4-1]", "test_rows_of_a_blend_continue",
    "test_results_do_not_bring_megatron_along", "test_packs_of_a_worker_do_not_depend",
    "test_the_examples_train[", "test_the_run_tells_how_long_it_stood_still",
    "test_emulation_after_megatron_is_an_error", "test_peak_memory_sees_a_freed_tensor",
    "test_mistakes_are_one_message_and_exit_code_2", "test_a_stall_leaves_the_last_collectives",
    "test_moe_trains_under_tensor_expert_and_sequence_parallelism", "test_help_of_a_program_of_ranks",
    "test_an_expression_that_takes_too_long",
    "unit/data/test_real_tokenizers.py",
)


def is_fast(nodeid: str) -> bool:
    """Whether the fast suite runs a test."""
    path, _, name = nodeid.partition("::")
    if path.startswith("tests/dist/"):
        return any(word in name for word in FAST_DIST.get(path.removeprefix("tests/dist/"), ()))
    return not any(word in nodeid for word in SLOW)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not in the fast suite."""
    for item in items:
        if not is_fast(item.nodeid):
            item.add_marker(pytest.mark.slow)
