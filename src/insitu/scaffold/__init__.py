"""Scaffold: the project that `insitu init` writes, and the frameworks it is written for."""
