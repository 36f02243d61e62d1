"""From a trained actor to an ONNX file that holds everything it needs. Offline only: the server never imports this."""
