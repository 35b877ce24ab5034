"""From the bytes of an ONNX file, or of a folder with external data, to a model at the internal opset."""
