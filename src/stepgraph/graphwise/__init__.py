"""The same decisions where a step cannot be captured whole: graph after graph."""
