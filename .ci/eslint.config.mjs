// Rules for the dashboard's own scripts (launch/dashboard_pages/*.js); prettier formats them.
const browser =
  "document window location history localStorage fetch setInterval requestAnimationFrame matchMedia " +
  "getComputedStyle URLSearchParams Blob Response DecompressionStream atob ResizeObserver IntersectionObserver " +
  "devicePixelRatio addEventListener innerWidth innerHeight scrollTo performance dispatchEvent HashChangeEvent";

export default [
  {
    languageOptions: {
      ecmaVersion: 2023,
      sourceType: "module",
      globals: Object.fromEntries(browser.split(" ").map((name) => [name, "readonly"])),
    },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "max-len": ["error", { code: 120 }],
      complexity: ["error", 25],
      eqeqeq: "error",
      "no-const-assign": "error",
      "no-dupe-keys": "error",
      "no-redeclare": "error",
      "no-shadow": "error",
      "no-undef": "error",
      "no-unreachable": "error",
      "no-unused-vars": "error",
      "no-useless-return": "error",
      "no-var": "error",
      "object-shorthand": "error",
      "one-var": ["error", "never"],
      "prefer-const": "error",
      "prefer-template": "error",
    },
  },
];
