// libnvrtc: "compiles" by finding out which of the shim's kernels a source holds.
#include <string.h>

#include <algorithm>
#include <set>

#include "../shim/emu.h"
#include "engine.h"
#include "image.h"
#include "sources.h"

using namespace fake;

namespace {

enum { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

const int ARCHITECTURES[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Program {
    std::string source, name, log;
    std::set<std::string> headers;
    std::string cubin, ptx;
    bool compiled = false;
};

std::mutex mutex;
std::set<Program*>& programs() {
    static auto* all = new std::set<Program*>();
    return *all;
}

bool is_word(char c) { return c == '_' || isalnum((unsigned char)c); }

bool has_word(const std::string& text, const std::string& word) {
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
        const bool begins = at == 0 || !is_word(text[at - 1]);
        const size_t end = at + word.size();
        if (begins && (end == text.size() || !is_word(text[end]))) return true;
    }
    return false;
}

// The kernels of a source: those of the file that it is, else all whose names stand in it as they are.
std::vector<std::string> kernels_of(const std::string& source, bool* is_ours) {
    std::vector<std::string> names;
    *is_ours = false;
    for (const Source& ours : SOURCES) {
        if (source.find(ours.text) == std::string::npos) continue;
        *is_ours = true;
        for (const char* const* name = ours.kernels; *name; name++) names.push_back(*name);
    }
    if (*is_ours) return names;
    for (int i = 0; emu_kernel_name(i); i++)
        if (has_word(source, emu_kernel_name(i))) names.push_back(emu_kernel_name(i));
    return names;
}

// Headers that the source asks for and that were not given.
bool check_includes(Program& p) {
    for (size_t at = p.source.find("#include"); at != std::string::npos; at = p.source.find("#include", at + 1)) {
        const size_t open = p.source.find_first_of("\"<\n", at + 8);
        if (open == std::string::npos || p.source[open] == '\n') continue;
        const size_t close = p.source.find_first_of("\">\n", open + 1);
        if (close == std::string::npos) continue;
        const std::string name = p.source.substr(open + 1, close - open - 1);
        if (p.headers.count(name)) continue;
        const long line = std::count(p.source.begin(), p.source.begin() + at, '\n') + 1;
        p.log += p.name + "(" + std::to_string(line) + "): catastrophic error: cannot open source file \"" + name + "\"\n";
        return false;
    }
    return true;
}

bool starts(const std::string& text, const char* with, std::string* rest) {
    if (text.compare(0, strlen(with), with) != 0) return false;
    *rest = text.substr(strlen(with));
    return true;
}

// -arch and its longer forms: sm_90, sm_90a, compute_80. Returns false for what does not exist.
bool architecture(const std::string& text, Image* image) {
    std::string number;
    if (starts(text, "compute_", &number)) image->is_ptx = true;
    else if (!starts(text, "sm_", &number)) return false;
    while (!number.empty() && (number.back() == 'a' || number.back() == 'f')) number.pop_back();
    image->arch = atoi(number.c_str());
    for (int known : ARCHITECTURES)
        if (known == image->arch) return true;
    return false;
}

}  // namespace

#define BEGIN(name)                                                      \
    std::lock_guard<std::mutex> lock(mutex);                             \
    {                                                                    \
        Lock counted(world().lock);                                      \
        if (int code = count_call(name)) return code;                    \
    }
#define BEGIN_WITH(p)                                                    \
    BEGIN(__func__)                                                      \
    if (!programs().count(p)) return INVALID_PROGRAM

FAKE_API int nvrtcVersion(int* major, int* minor) {
    BEGIN(__func__)
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

FAKE_API const char* nvrtcGetErrorString(int code) {
    const char* const names[] = {"NVRTC_SUCCESS",
                                 "NVRTC_ERROR_OUT_OF_MEMORY",
                                 "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                 "NVRTC_ERROR_INVALID_INPUT",
                                 "NVRTC_ERROR_INVALID_PROGRAM",
                                 "NVRTC_ERROR_INVALID_OPTION",
                                 "NVRTC_ERROR_COMPILATION",
                                 "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE"};
    return code >= 0 && code < 8 ? names[code] : "NVRTC_ERROR unknown";
}

FAKE_API int nvrtcGetNumSupportedArchs(int* count) {
    BEGIN(__func__)
    *count = sizeof ARCHITECTURES / sizeof *ARCHITECTURES;
    return SUCCESS;
}

FAKE_API int nvrtcGetSupportedArchs(int* out) {
    BEGIN(__func__)
    for (int known : ARCHITECTURES) *out++ = known;
    return SUCCESS;
}

FAKE_API int nvrtcCreateProgram(Program** out, const char* source, const char* name, int header_count,
                                const char* const* headers, const char* const* header_names) {
    BEGIN(__func__)
    if (!out || !source || header_count < 0 || (header_count > 0 && (!headers || !header_names))) return INVALID_INPUT;
    Program* p = new Program();
    p->source = source;
    p->name = name ? name : "default_program";
    for (int i = 0; i < header_count; i++) p->headers.insert(header_names[i]);
    programs().insert(p);
    *out = p;
    return SUCCESS;
}

FAKE_API int nvrtcDestroyProgram(Program** p) {
    BEGIN(__func__)
    if (!p || !programs().erase(*p)) return INVALID_PROGRAM;
    delete *p;
    *p = nullptr;
    return SUCCESS;
}

FAKE_API int nvrtcCompileProgram(Program* p, int option_count, const char* const* options) {
    BEGIN_WITH(p);
    Image image;
    image.arch = 75;
    image.is_ptx = true;
    p->log.clear();
    for (int i = 0; i < option_count; i++) {
        std::string option = options[i], value;
        const bool is_arch = starts(option, "--gpu-architecture=", &value) || starts(option, "-arch=", &value);
        if (option == "--gpu-architecture" || option == "-arch") value = ++i < option_count ? options[i] : "";
        else if (!is_arch && !option.empty() && option[0] == '-') continue;
        image.is_ptx = false;
        if (architecture(value, &image)) continue;
        p->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
        return INVALID_OPTION;
    }
    bool is_ours;
    image.kernels = kernels_of(p->source, &is_ours);
    // Our own files are compiled by g++ too: an #error in them is one of a configuration.
    const size_t error = is_ours ? std::string::npos : p->source.find("#error");
    if (error != std::string::npos) {
        const long line = std::count(p->source.begin(), p->source.begin() + error, '\n') + 1;
        const std::string text = p->source.substr(error, p->source.find('\n', error) - error);
        p->log = p->name + "(" + std::to_string(line) + "): catastrophic error: " + text + "\n";
        return COMPILATION;
    }
    if (!check_includes(*p)) return COMPILATION;
    p->compiled = true;
    if (image.is_ptx) {
        p->cubin.clear();
    } else {
        p->cubin = print_image(image);
    }
    Image ptx = image;
    ptx.is_ptx = true;
    p->ptx = print_image(ptx);
    return SUCCESS;
}

FAKE_API int nvrtcGetProgramLogSize(Program* p, size_t* size) {
    BEGIN_WITH(p);
    *size = p->log.size() + 1;
    return SUCCESS;
}
FAKE_API int nvrtcGetProgramLog(Program* p, char* out) {
    BEGIN_WITH(p);
    memcpy(out, p->log.c_str(), p->log.size() + 1);
    return SUCCESS;
}
// 0 where only PTX was asked for, as of NVRTC.
FAKE_API int nvrtcGetCUBINSize(Program* p, size_t* size) {
    BEGIN_WITH(p);
    if (!p->compiled) return INVALID_PROGRAM;
    *size = p->cubin.size();
    return SUCCESS;
}
FAKE_API int nvrtcGetCUBIN(Program* p, char* out) {
    BEGIN_WITH(p);
    if (!p->compiled || p->cubin.empty()) return INVALID_PROGRAM;
    memcpy(out, p->cubin.data(), p->cubin.size());
    return SUCCESS;
}
FAKE_API int nvrtcGetPTXSize(Program* p, size_t* size) {
    BEGIN_WITH(p);
    if (!p->compiled) return INVALID_PROGRAM;
    *size = p->ptx.size() + 1;
    return SUCCESS;
}
FAKE_API int nvrtcGetPTX(Program* p, char* out) {
    BEGIN_WITH(p);
    if (!p->compiled) return INVALID_PROGRAM;
    memcpy(out, p->ptx.c_str(), p->ptx.size() + 1);
    return SUCCESS;
}
