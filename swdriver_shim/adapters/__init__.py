"""Engines that use the driver, each as it likes to be used."""
