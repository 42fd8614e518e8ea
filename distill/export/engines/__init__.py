"""The engines that an export is written for. Each file registers one."""
