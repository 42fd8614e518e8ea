"""Model calls on a CPU in compiled C++, built once per machine for all supported models, shapes and dtypes."""
