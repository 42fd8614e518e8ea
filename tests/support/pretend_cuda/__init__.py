"""A cuda:0 on the CPU build of torch: tensors that say they are there, with their data where no CPU code can reach it."""
