"""Ahead-of-time compilation: TileLang specs -> cubins, generated C++ launchers, one library per CPU, and a manifest."""
