"""The five systems under the name that tutorials use; see `headwise.tutorial.implementations`."""
