"""Doodle: a small text-to-image model that is not diffusers', served by Saggar as a plug-in."""
