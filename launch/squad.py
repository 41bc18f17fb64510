"""SQuAD as it is published -> JSONL of prompt and completion: python3 squad.py train-v1.1.json train.jsonl"""

import json
import os
import sys


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        articles = json.load(file)["data"]
    with open(f"{target}.partial", "w", encoding="utf-8") as file:
        for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
            for question in paragraph["qas"]:
                prompt = f"Context: {paragraph['context']} Question: {question['question']} Answer:"
                row = {"prompt": prompt, "completion": f" {question['answers'][0]['text']}"}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(f"{target}.partial", target)


if __name__ == "__main__":
    main(*sys.argv[1:])
