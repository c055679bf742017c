"""How the demonstration's model is made: pictures, dialogues, training, evaluation, export (docs/demo-model.md)."""
