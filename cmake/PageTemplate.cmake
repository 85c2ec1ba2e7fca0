# cmake -DIN=page.html -DOUT=FILE.cpp -P PageTemplate.cmake
# Writes a source file that holds the template of pages.
file(READ "${IN}" text)
file(WRITE "${OUT}" "// Made by cmake/PageTemplate.cmake.
namespace kiln {

const char* page_template() { return R\"page(${text})page\"; }

}  // namespace kiln
")
