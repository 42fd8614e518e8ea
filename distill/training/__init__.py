"""The Accelerate loop and its inputs."""
