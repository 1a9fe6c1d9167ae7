"""The microbenchmarks behind `offload bench nvme` and `offload bench link`."""
