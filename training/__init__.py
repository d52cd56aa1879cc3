"""Trains, exports and scores the small emoji model that ships with Saggar.

Order of use: ``fetch`` (pictures), ``train`` (VAE, then flow), ``export`` (pipeline), ``score``, ``card``.
"""
