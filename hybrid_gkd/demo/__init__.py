"""The models and data of the recipes that need none of the user's."""
