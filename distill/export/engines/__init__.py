"""The engines that an export is written for; each file registers its own."""
