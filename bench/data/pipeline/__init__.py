"""What the data sources share: a corpus, its tokenizer, T5's span corruption and torch's loader."""
