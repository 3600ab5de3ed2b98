// The kernel files that the library was built with: their texts and their kernels' names. build.rs writes the table.
#pragma once

namespace fake {

struct Source {
    const char* text;
    const char* const* kernels;  // ends with null
};
extern const Source* const SOURCES_BEGIN;
extern const int SOURCES_COUNT;

struct SourceRange {
    const Source* begin() const { return SOURCES_BEGIN; }
    const Source* end() const { return SOURCES_BEGIN + SOURCES_COUNT; }
};
static const SourceRange SOURCES;

}  // namespace fake
