"""Models and data of the demo recipes, which need no input of the user."""
