"""What runs a program's graph: ONNX Runtime, the kernel pack, OpenVINO; and the choice among them."""
