"""A model of eager PyTorch without torch: storages, views, and what autograd keeps; no numbers are computed."""
