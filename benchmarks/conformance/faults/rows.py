"""Every fault of tensordict 0.14.3, torch.func and torch.optim that a survey of them found, and the test that runs it.

A test runs theirs, which shows that the row is real, and ours. Where theirs cannot be run here (the fault needs another
version, another file system, or a process that is killed at a random moment), the row says so instead.
"""

_BIND = "benchmarks/conformance/faults/test_modules.py"
_KINDS = "benchmarks/conformance/faults/test_kinds.py"
_TREE = "benchmarks/conformance/faults/test_trees.py"
_FOLDERS = "benchmarks/conformance/faults/test_folders.py"
_FILES = "benchmarks/conformance/faults/test_checkpoints.py"
_OPTIM = "benchmarks/conformance/faults/test_optim.py"
_RELIABILITY = "counted in docs/reliability.md, both sides, by benchmarks/reliability"

SWAPPING = {
    "an exception in a block": f"{_BIND}::test_exception_in_the_body",
    "KeyboardInterrupt, GeneratorExit, SystemExit in a block": f"{_BIND}::test_base_exception_in_the_body",
    "an exception in a nested block": f"{_BIND}::test_exception_in_a_nested_block",
    "nested blocks": f"{_BIND}::test_nested_blocks",
    "an exception in an unlocked block": f"{_BIND}::test_exception_in_an_unlocked_block",
    "two generators that hold one module": f"{_BIND}::test_interleaved_generators",
    "two threads": f"{_BIND}::test_two_threads",
    "a memory-mapped tree into a module": f"{_BIND}::test_memory_mapped_weights",
    "an unknown key": f"{_BIND}::test_unknown_key_half_way",
    "missing, extra and misshapen keys": f"{_BIND}::test_missing_extra_and_misshapen_keys",
    "a wrong shape for good": f"{_BIND}::test_wrong_shapes_for_good",
    "order of slots": f"{_BIND}::test_order_after_a_part_is_loaded",
    "tied weights after an operation": f"{_BIND}::test_tied_weights_after_an_operation",
    "values that break a tie": f"{_BIND}::test_values_that_break_a_tie",
    "a tie by state dict": f"{_BIND}::test_tied_weights_by_state_dict",
    "ties of GPT-2, stacked": f"{_BIND}::test_tied_weights_of_gpt2",
    "a sub-module under two names": f"{_BIND}::test_shared_submodule",
    "the function and the classmethod differ": f"{_BIND}::test_the_classmethod_and_the_function_differ",
    "from_module does not copy": f"{_BIND}::test_the_leaves_are_the_modules_own",
    "`.data` is the live model": f"{_BIND}::test_data_of_a_tree",
    "gradients to a computed leaf, by patch version": f"{_BIND}::test_gradients_to_what_a_leaf_was_computed_from",
    "names of parameters that collide": f"{_BIND}::test_registered_names_that_collide",
    "a tree of parameters is one leaf": f"{_BIND}::test_trees_of_parameters_are_trees",
    "forward-mode derivatives": f"{_BIND}::test_forward_mode",
    "grad and hessian": f"{_BIND}::test_reverse_mode_and_hessian",
    "non-persistent buffers": f"{_BIND}::test_non_persistent_buffers",
    "buffers written in a block": f"{_BIND}::test_batch_norm_writes_to_what_it_was_given",
    "buffers written under vmap": f"{_BIND}::test_writes_to_buffers_under_vmap",
}

MODULES = {
    "BatchNorm, stacked buffers": f"{_BIND}::test_batch_norm_of_stacked_members",
    "BatchNorm, shared buffers": f"{_BIND}::test_batch_norm_with_shared_buffers",
    "BatchNorm under grad": f"{_BIND}::test_batch_norm_under_grad",
    "BatchNorm, cumulative average": f"{_BIND}::test_batch_norm_with_a_cumulative_average",
    "dropout": f"{_BIND}::test_dropout_of_members",
    "a module's own generator": f"{_BIND}::test_a_modules_own_generator",
    "a plain tensor as an attribute": f"{_KINDS}::test_a_plain_tensor_attribute",
    "a cached reference": f"{_KINDS}::test_a_cached_reference",
    "a parametrized weight by its own name": f"{_KINDS}::test_a_parametrized_weight_by_its_own_name",
    "parametrize.cached": f"{_KINDS}::test_cached_parametrizations",
    "weight_norm and orthogonal parametrizations": "tests/modules/test_skeleton.py: both are right",
    "spectral_norm": f"{_KINDS}::test_spectral_norm_of_separate_members",
    "the old weight_norm": f"{_KINDS}::test_old_weight_norm",
    "recurrent layers": f"{_KINDS}::test_recurrent_layers",
    "GRUCell and RNNCell": f"{_KINDS}::test_cells_that_vmap_can_run",
    "transformers under vmap": "tests/modules/test_functional.py: both are right",
    "lazy modules": f"{_KINDS}::test_lazy_modules",
    "ScriptModule": f"{_KINDS}::test_script_modules",
    "compiled modules": f"{_KINDS}::test_compiled_modules",
    "old autograd functions": f"{_KINDS}::test_old_autograd_functions",
    "writes in place, data-dependent code": f"{_KINDS}::test_control_flow_and_in_place_writes",
    "hooks": f"{_KINDS}::test_hooks_fire",
    "a skeleton of meta tensors": f"{_KINDS}::test_meta_tensors_do_not_notice",
    "pickles": f"{_KINDS}::test_pickled_trees",
    "members of other layers": f"{_KINDS}::test_members_with_different_layers",
    "members of other hyperparameters": f"{_KINDS}::test_members_with_different_hyperparameters",
    "clipping of stacked gradients": f"{_OPTIM}::test_clipping_couples_members",
    "a learning rate for each member": f"{_OPTIM}::test_a_learning_rate_for_each_member",
    "Adafactor and Muon on stacked leaves": f"{_OPTIM}::test_optimizers_that_mix_elements",
    "foreach kernels under vmap": f"{_OPTIM}::test_an_update_inside_vmap",
}

FOLDERS = {
    "loading runs pickles": f"{_FOLDERS}::test_loading_runs_no_code",
    "saving writes pickles": f"{_FILES}::test_data_that_json_cannot_hold",
    "keys shape, device and _type": f"{_FOLDERS}::test_keys_that_are_fields_of_the_format",
    "a save into a new folder is killed": _RELIABILITY,
    "a write over a folder that stops half way": f"{_FILES}::test_a_write_that_stops_half_way",
    "a killed save of an archive": "theirs is right: what is left of it are temporary files",
    "a file that is cut short": f"{_FILES}::test_a_file_that_is_cut_short",
    "a flipped bit": f"{_FILES}::test_a_flipped_bit",
    "a missing leaf or sub-tree": f"{_FOLDERS}::test_a_leaf_or_sub_tree_that_is_missing",
    "a meta.json that lies": f"{_FOLDERS}::test_a_description_that_lies",
    "a smaller tree over a larger": f"{_FOLDERS}::test_a_smaller_tree_over_a_larger_one",
    "loads are written through, also through links": f"{_FOLDERS}::test_a_loaded_tree_is_written_to",
    "keys that lead out of the folder": f"{_FOLDERS}::test_a_key_that_leads_out_of_the_folder",
    "keys that are no file names": f"{_FOLDERS}::test_keys_that_are_no_file_names",
    "keys that differ in case only": "needs a file system that ignores case; both write two files on this one",
    "names, Parameters, ties": f"{_FOLDERS}::test_what_a_folder_keeps",
    "float8": f"{_FOLDERS}::test_small_floats",
    "leaves of no elements": "tests/storage/test_memmap.py: both are right",
    "one file that is cut short": f"{_FOLDERS}::test_one_file_that_is_cut_short",
    "a typed tree of another script": f"{_FOLDERS}::test_typed_trees_of_another_program",
    "torch.load with weights_only": f"{_KINDS}::test_pickled_trees",
    "more room than the disk has": f"{_FILES}::test_room_for_more_than_the_disk",
    "rows that a map leaves out": f"{_FILES}::test_rows_that_are_left_out_of_a_map_with_out",
}

TRANSFORMS = {
    "order of keys": f"{_TREE}::test_order_of_keys_is_no_structure",
    "batch size in the structure": f"{_TREE}::test_batch_size_is_no_structure",
    "the batch size is guessed": f"{_TREE}::test_batch_size_after_a_map",
    "a map changes a structure": f"{_TREE}::test_names_after_a_map",
    "a map to None": f"{_TREE}::test_none_is_a_leaf",
    "leaves that are no tensors": f"{_TREE}::test_leaves_that_are_no_tensors",
    "paths of a lazy stack": f"{_TREE}::test_paths_of_a_lazy_stack",
    "non-tensor data in a map": f"{_TREE}::test_data_that_are_no_tensors_in_a_map",
    "optree": f"{_TREE}::test_optree",
    "the import replaces parts of torch": f"{_TREE}::test_import_leaves_torch_alone",
    "arithmetic in vmap": f"{_TREE}::test_arithmetic_in_vmap",
    "vmap without a batch": f"{_TREE}::test_vmap_of_a_tree_without_a_batch",
    "vmap in chunks": f"{_TREE}::test_chunks_of_a_vmap",
    "masks under the compiler": f"{_TREE}::test_masks_under_the_compiler",
    "derivatives with respect to a tree": f"{_TREE}::test_derivatives_with_respect_to_a_tree",
}

CONTAINER = {
    "iterating without a batch": f"{_TREE}::test_iterating_without_a_batch",
    "keys that are no str": f"{_TREE}::test_bad_keys",
    "keys called as arguments": f"{_TREE}::test_keys_named_like_arguments",
    "flat keys that collide": f"{_TREE}::test_flat_keys_that_collide",
    "flat keys that hold the separator": f"{_TREE}::test_flat_keys_that_hold_the_separator",
    "empty keys": f"{_TREE}::test_unflatten_makes_no_empty_keys",
    "set_ casts": f"{_TREE}::test_set_in_place_keeps_values",
    "index assignment writes to the caller's tensor": f"{_TREE}::test_index_assignment_is_refused",
    "writes to a row": f"{_TREE}::test_writing_to_a_row",
    "locked": f"{_TREE}::test_locked_is_not_immutable",
    "frozen": f"{_TREE}::test_frozen_is_not_immutable",
    "tensor operands": f"{_TREE}::test_tensor_operands_meet_the_batch",
    "comparing trees of other keys, hashing": f"{_TREE}::test_comparing_trees_with_other_keys",
    "a part of a state dict": f"{_TREE}::test_a_part_of_a_state_dict",
    "a state dict that does not fit": f"{_TREE}::test_a_state_dict_that_does_not_fit",
    "preallocation": f"{_TREE}::test_preallocation_has_no_silent_zeros",
    "reductions by name": f"{_TREE}::test_missing_dimensions_of_reductions",
    "moving an entry under itself": f"{_TREE}::test_lost_entry",
    "features that meet the batch": f"{_TREE}::test_silent_broadcast",
    "ragged fields": f"{_TREE}::test_a_ragged_field_reads_alike_whatever_the_lengths",
    "a published import that is gone": f"{_TREE}::test_the_snippet_of_an_old_document",
    "the time of the import": "tests/test_import_cost.py",
}

ROWS = SWAPPING | MODULES | FOLDERS | TRANSFORMS | CONTAINER
