"""One file a view: its view model, its static twin, its live widget."""
