"""What is fuzzed and mutated: for each target its good inputs, and the check that any input must pass."""

from benchmarks.reliability import loads, values

SEEDS = {
    "file": loads.file_seeds,
    "tree": loads.tree_seeds,
    "values": values.value_seeds,
    "index": loads.index_seeds,
    "memmap": loads.memmap_seeds,
}
CHECKS = {
    "file": loads.check_file,
    "tree": loads.check_tree,
    "values": values.check_values,
    "index": loads.check_index,
    "memmap": loads.check_memmap,
}
