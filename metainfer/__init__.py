"""metainfer: mixture-of-experts inference for machines whose GPUs are linked by PCIe alone."""

__version__ = "0.1.0"
