"""Load tests of OpenAI-compatible and policy servers, on locust."""
