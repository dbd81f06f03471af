"""Steps of real models on a virtual clock: what offloading costs on a device that this machine need not have."""
