// What the fake NVRTC makes and the fake driver loads: text with the kernels' names.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

namespace fake {

struct Image {
    bool is_ptx = false;
    int arch = 0;  // 10 * major + minor
    std::vector<std::string> kernels;
};

// "paraft fake cubin 90\nNAME\n...end\n": ended by a marker, since cuModuleLoadData is not told a length.
inline std::string print_image(const Image& image) {
    std::string text = std::string("paraft fake ") + (image.is_ptx ? "ptx " : "cubin ") + std::to_string(image.arch) + "\n";
    for (const std::string& name : image.kernels) text += name + "\n";
    return text + "end\n";
}

inline bool parse_image(const char* text, Image* out) {
    const char *cubin = "paraft fake cubin ", *ptx = "paraft fake ptx ";
    out->is_ptx = strncmp(text, ptx, strlen(ptx)) == 0;
    if (!out->is_ptx && strncmp(text, cubin, strlen(cubin)) != 0) return false;
    char* at;
    out->arch = (int)strtol(text + strlen(out->is_ptx ? ptx : cubin), &at, 10);
    if (*at++ != '\n') return false;
    while (strncmp(at, "end\n", 4) != 0) {
        const char* line = strchr(at, '\n');
        if (!line) return false;
        out->kernels.emplace_back((const char*)at, line);
        at = (char*)line + 1;
    }
    return true;
}

}  // namespace fake
