// See grammar_check.hpp. What is checked here is what src/llama-grammar.cpp does not bound: the parser recurses for
// each nested group; the check for left recursion recurses, visits a rule once for each way to reach it, and overlooks
// rules that are empty through other rules, on which the reading of a grammar then never ends.
#include "grammar_check.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace shoal {

void refuse_grammar(const std::string & why) {
    throw std::invalid_argument("grammar: " + why);
}

} // namespace shoal

namespace {

using shoal::refuse_grammar;

constexpr size_t MAX_GROUP_DEPTH = 200;

// Ways in which a rule can begin: llama.cpp looks at each when it checks the grammar.
constexpr size_t MAX_LEFT_PATHS = 10000;

// Rules in a row of which each begins with the next: 128 bytes of stack each in llama.cpp's check.
constexpr size_t MAX_LEFT_DEPTH = 4000;

// Elements looked at to learn which rules may match nothing: well under a second.
constexpr size_t MAX_EMPTY_WORK = 100000000;

// ---- the text ----

// Skips what may stand before a rule.
const char * skip_blank(const char * at) {
    while (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n' || *at == '#') {
        if (*at == '#') {
            at += std::strcspn(at, "\r\n");
        } else {
            ++at;
        }
    }
    return at;
}

// The end of a quoted literal or character class that starts at `at`.
size_t skip_quoted(const std::string & gbnf, size_t at) {
    const char close = gbnf[at] == '"' ? '"' : ']';
    for (++at; at < gbnf.size() && gbnf[at] != close; ++at) {
        if (gbnf[at] == '\\') {
            ++at;
        }
    }
    return at;
}

void check_group_depth(const std::string & gbnf) {
    size_t depth = 0;
    for (size_t at = 0; at < gbnf.size(); ++at) {
        switch (gbnf[at]) {
            case '"': case '[': at = skip_quoted(gbnf, at); break;
            case '#': at = std::min(gbnf.find_first_of("\r\n", at), gbnf.size()); break;
            case '(': ++depth; break;
            case ')': depth -= depth > 0 ? 1 : 0; break;
            default: break;
        }
        if (depth > MAX_GROUP_DEPTH) {
            refuse_grammar("groups nest deeper than " + std::to_string(MAX_GROUP_DEPTH));
        }
    }
}

// ---- the rules ----

std::string name_of(const llama_grammar_parser & parser, uint32_t rule) {
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id == rule) {
            return name;
        }
    }
    return std::to_string(rule);
}

void check_rules_defined(const llama_grammar_parser & parser) {
    if (parser.symbol_ids.find("root") == parser.symbol_ids.end()) {
        refuse_grammar("no rule is named root");
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            refuse_grammar("rule " + name + " is used but not defined");
        }
    }
}

bool ends_alternative(const llama_grammar_element & element) {
    return element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
}

// Whether an alternative of `rule` matches nothing, given which rules may.
bool may_be_empty(const llama_grammar_rule & rule, const std::vector<bool> & empty_rules) {
    bool empty = true;
    for (const auto & element : rule) {
        if (ends_alternative(element)) {
            if (empty) {
                return true;
            }
            empty = true;
        } else if (element.type != LLAMA_GRETYPE_RULE_REF || !empty_rules[element.value]) {
            empty = false;
        }
    }
    return false;
}

// Rules with an alternative that has nothing in it: what llama.cpp takes to be empty.
std::vector<bool> plainly_empty(const llama_grammar_rules & rules) {
    const std::vector<bool> none(rules.size());
    std::vector<bool> result(rules.size());
    for (size_t rule = 0; rule < rules.size(); ++rule) {
        result[rule] = may_be_empty(rules[rule], none);
    }
    return result;
}

// Rules that may match nothing: the least fixed point.
std::vector<bool> truly_empty(const llama_grammar_rules & rules) {
    size_t size = 0;
    for (const auto & rule : rules) {
        size += rule.size();
    }
    std::vector<bool> result(rules.size());
    size_t work = 0;
    for (bool changed = true; changed;) {
        changed = false;
        work += size;
        if (work > MAX_EMPTY_WORK) {
            refuse_grammar("too many rules");
        }
        for (size_t rule = 0; rule < rules.size(); ++rule) {
            if (!result[rule] && may_be_empty(rules[rule], result)) {
                result[rule] = changed = true;
            }
        }
    }
    return result;
}

// A rule that may be the first thing read of another.
struct left_edge {
    uint32_t rule;
    bool last; // nothing follows it in its alternative
};

using left_graph = std::vector<std::vector<left_edge>>;

left_graph left_edges(const llama_grammar_rules & rules, const std::vector<bool> & empty_rules) {
    left_graph graph(rules.size());
    for (size_t rule = 0; rule < rules.size(); ++rule) {
        bool at_left = true;
        for (size_t i = 0; i < rules[rule].size(); ++i) {
            const auto & element = rules[rule][i];
            if (ends_alternative(element)) {
                at_left = true;
            } else if (at_left && element.type == LLAMA_GRETYPE_RULE_REF) {
                graph[rule].push_back({ element.value, ends_alternative(rules[rule][i + 1]) });
                at_left = empty_rules[element.value];
            } else {
                at_left = false;
            }
        }
    }
    return graph;
}

// Tarjan's strongly connected components, without recursion. Components are numbered so that edges between them go
// from higher to lower numbers; `order` lists the rules by component.
struct components {
    std::vector<uint32_t> of;
    std::vector<uint32_t> order;

    explicit components(const left_graph & graph)
        : of(graph.size(), NONE), graph(graph), index(graph.size(), NONE), low(graph.size()) {
        for (uint32_t rule = 0; rule < graph.size(); ++rule) {
            if (index[rule] == NONE) {
                visit(rule);
            }
        }
    }

  private:
    static constexpr uint32_t NONE = UINT32_MAX;

    void open(uint32_t rule) {
        index[rule] = low[rule] = n_visited++;
        path.push_back(rule);
        todo.emplace_back(rule, 0);
    }

    void visit(uint32_t first) {
        open(first);
        while (!todo.empty()) {
            const uint32_t rule = todo.back().first;
            if (todo.back().second < graph[rule].size()) {
                const uint32_t child = graph[rule][todo.back().second++].rule;
                if (index[child] == NONE) {
                    open(child);
                } else if (of[child] == NONE) {
                    low[rule] = std::min(low[rule], index[child]);
                }
                continue;
            }
            todo.pop_back();
            if (!todo.empty()) {
                low[todo.back().first] = std::min(low[todo.back().first], low[rule]);
            }
            if (low[rule] == index[rule]) {
                close(rule);
            }
        }
    }

    void close(uint32_t root) {
        uint32_t rule;
        do {
            rule = path.back();
            path.pop_back();
            of[rule] = n_components;
            order.push_back(rule);
        } while (rule != root);
        ++n_components;
    }

    const left_graph & graph;
    std::vector<uint32_t> index;
    std::vector<uint32_t> low;
    std::vector<uint32_t> path;
    std::vector<std::pair<uint32_t, size_t>> todo;
    uint32_t n_visited = 0;
    uint32_t n_components = 0;
};

// Which rules that begin with themselves are refused: all, or those that something follows there, whose reading piles
// that up for ever.
enum class refused_recursion { ANY, GROWING };

void check_left(const llama_grammar_parser & parser, const std::vector<bool> & empty_rules, refused_recursion refused) {
    const left_graph graph = left_edges(parser.rules, empty_rules);
    const components found(graph);
    std::vector<size_t> paths(graph.size(), 1);
    std::vector<size_t> depth(graph.size(), 1);
    for (const uint32_t rule : found.order) {
        for (const auto & edge : graph[rule]) {
            if (found.of[edge.rule] == found.of[rule]) {
                if (refused == refused_recursion::ANY || !edge.last) {
                    refuse_grammar("rule " + name_of(parser, rule) + " is left-recursive");
                }
                continue;
            }
            paths[rule] += paths[edge.rule];
            depth[rule] = std::max(depth[rule], depth[edge.rule] + 1);
        }
        if (paths[rule] > MAX_LEFT_PATHS || depth[rule] > MAX_LEFT_DEPTH) {
            refuse_grammar("rule " + name_of(parser, rule) + " can begin in too many ways");
        }
    }
}

} // namespace

llama_grammar_parser shoal::parse_gbnf(const llama_vocab * vocab, const std::string & gbnf) {
    if (gbnf.find('\0') != std::string::npos) {
        refuse_grammar("holds a NUL byte");
    }
    check_group_depth(gbnf);
    llama_grammar_parser parser(vocab);
    try {
        // Not parser.parse(): it prints its errors, and the whole grammar, to stderr.
        for (const char * at = skip_blank(gbnf.c_str()); *at != '\0';) {
            at = parser.parse_rule(at);
        }
    } catch (const std::runtime_error & e) {
        refuse_grammar(e.what());
    } catch (const std::logic_error & e) { // std::stoull of a count or token id
        refuse_grammar(std::string("a number that is out of range (") + e.what() + ")");
    }
    check_rules_defined(parser);
    // As llama.cpp checks it, to bound that check; then as it reads it, where a rule that ends with itself is harmless.
    check_left(parser, plainly_empty(parser.rules), refused_recursion::ANY);
    check_left(parser, truly_empty(parser.rules), refused_recursion::GROWING);
    return parser;
}
