UPDATE store SET layout = NULL;
