// Rules for the page's scripts: they run in the browser as they are written here.
import js from "@eslint/js";
import globals from "globals";

const MODULE_STATE = "Keep a module's state in one constant object, not in variables.";

export default [
  js.configs.recommended,
  {
    languageOptions: { globals: globals.browser },
    rules: {
      complexity: ["error", 14],
      "max-len": ["error", { code: 120 }],
      "max-lines": ["error", 250],
      "max-lines-per-function": ["error", 40],
      "no-restricted-syntax": ["error", { selector: "Program > VariableDeclaration[kind!=const]", message: MODULE_STATE }],
      "no-var": "error",
      "prefer-const": "error",
    },
  },
];
