"""Scans and convolutions of Mamba-2 and the gated delta rule.

scans.py                   the definitions in torch, in chunks
triton_scans.py            the same in Triton: triton_scan_forward.py, triton_scan_gradients.py
triton_conv.py             the causal convolution before a scan, in Triton
"""
