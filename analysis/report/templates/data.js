// What the page knows: charts, columns, runs and configurations. Text of records only ever becomes text of elements.
const page = JSON.parse(document.getElementById("data").textContent);

const element = (tag, text, ...children) => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
};
