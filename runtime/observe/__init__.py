"""When each instruction ran, and how much memory a step takes, predicted and measured."""
