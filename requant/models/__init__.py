"""Models of transformers: loading, which matrices are quantized, devices and their memory."""
