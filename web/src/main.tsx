import "./style.css";

import { render } from "preact";

import { App } from "./App";

const place = document.getElementById("app");
if (place) render(<App />, place);
