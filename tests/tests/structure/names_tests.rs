//! Tests of the resolver with small crates in memory.

use std::collections::BTreeMap;

use crate::names::{Crate, Map, read};

fn krate(name: Option<&str>, root: &str) -> Crate {
    Crate { name: name.map(str::to_owned), root: root.to_owned(), is_tests: false }
}

fn map_of(crates: &[Crate], texts: &[(&str, &str)]) -> Map {
    let texts: BTreeMap<String, String> =
        texts.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
    read(crates, &texts).unwrap()
}

/// The arrows of one crate as "from:line to"; `src/` and `.rs` are left out.
fn arrows(texts: &[(&str, &str)]) -> Vec<String> {
    let map = map_of(&[krate(None, "src/lib.rs")], texts);
    assert!(map.unresolved.is_empty(), "{:?}", map.unresolved);
    let short =
        |file: usize| map.files[file].trim_start_matches("src/").trim_end_matches(".rs").to_owned();
    let real = map.arrows.iter().filter(|arrow| !arrow.facade);
    let mut found: Vec<String> = real
        .map(|arrow| format!("{}:{} {}", short(arrow.from), arrow.line, short(arrow.to)))
        .collect();
    found.sort();
    found.dedup();
    found
}

#[test]
fn an_import_is_an_arrow_to_the_file_that_defines_the_item() {
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", "use crate::b::Thing;"),
        ("src/b.rs", "pub struct Thing;"),
    ]);
    assert_eq!(found, ["a:1 b"]);
}

#[test]
fn super_of_super_is_followed() {
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a/mod.rs", "mod deep;"),
        ("src/a/deep/mod.rs", "fn f() {\n    super::super::b::g();\n}"),
        ("src/b.rs", "pub fn g() {}"),
    ]);
    assert_eq!(found, ["a/deep/mod:2 b"]);
}

#[test]
fn a_chain_of_reexports_ends_where_the_item_is() {
    let found = arrows(&[
        ("src/lib.rs", "mod user; mod front; mod back;"),
        ("src/user.rs", "use crate::front::Thing;"),
        ("src/front.rs", "pub use crate::back::Thing;"),
        ("src/back/mod.rs", "mod inner; pub use inner::Thing;"),
        ("src/back/inner.rs", "pub struct Thing;"),
    ]);
    // `back` passes on what a module below it defines, which is no use of it; `front` uses `back`.
    assert_eq!(found, ["front:1 back/inner", "user:1 back/inner"]);
}

#[test]
fn a_sibling_reached_through_an_import_of_the_parent_is_a_use_of_the_sibling() {
    let found = arrows(&[
        ("src/lib.rs", "mod room;"),
        ("src/room/mod.rs", "mod a; mod b; use b::Thing;"),
        ("src/room/a.rs", "use super::Thing;"),
        ("src/room/b.rs", "pub struct Thing;"),
    ]);
    assert_eq!(found, ["room/a:1 room/b", "room/mod:1 room/b"]);
}

#[test]
fn names_that_a_glob_brings_are_followed() {
    let found = arrows(&[
        ("src/lib.rs", "mod user; mod front; mod back;"),
        ("src/user.rs", "use crate::front::*;\nfn f(_: Thing) {}"),
        ("src/front.rs", "pub use crate::back::*;"),
        ("src/back.rs", "pub struct Thing;"),
    ]);
    assert_eq!(found, ["front:1 back", "user:1 front", "user:2 back"]);
}

#[test]
fn renamed_imports_are_followed() {
    let found = arrows(&[
        ("src/lib.rs", "mod user; mod b;"),
        ("src/user.rs", "use crate::b as other;\nfn f() {\n    other::g();\n}"),
        ("src/b.rs", "mod c;\npub use c::real as g;"),
        ("src/b/c.rs", "pub fn real() {}"),
    ]);
    assert_eq!(found, ["user:3 b/c"]);
}

#[test]
fn self_in_braces_brings_the_module_and_not_its_namesake() {
    let found = arrows(&[
        ("src/lib.rs", "mod user; mod b;"),
        ("src/user.rs", "use crate::b::run::{self};\nfn f() {\n    run::g();\n}"),
        ("src/b/mod.rs", "pub mod run; pub fn run() {}"),
        ("src/b/run.rs", "pub fn g() {}"),
    ]);
    assert_eq!(found, ["user:3 b/run"]);
}

#[test]
fn paths_in_code_types_and_macros_count() {
    let found = arrows(&[
        ("src/lib.rs", "mod user; mod b; mod c; mod d;"),
        (
            "src/user.rs",
            "fn f(_: Option<crate::b::T>) {\n    println!(\"{}\", crate::c::g());\n}\n\
             #[derive(super::d::D)]\nstruct S;",
        ),
        ("src/b.rs", "pub struct T;"),
        ("src/c.rs", "pub fn g() {}"),
        ("src/d.rs", "pub struct D;"),
    ]);
    assert_eq!(found, ["user:1 b", "user:2 c", "user:4 d"]);
}

#[test]
fn a_definition_of_a_macro_counts_by_its_paths_from_the_crate() {
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", "macro_rules! m { ($x:path) => { $crate::b::g(); $x::y(); super::z() } }"),
        ("src/b.rs", "pub fn g() {}"),
    ]);
    assert_eq!(found, ["a:1 b"]);
}

#[test]
fn an_import_in_a_block_holds_in_that_block() {
    let found = arrows(&[
        ("src/lib.rs", "mod user; mod b; mod c;"),
        (
            "src/user.rs",
            "use crate::b as x;\nfn f() {\n    use crate::c as x;\n    x::g();\n}\n\
             fn h() {\n    x::g();\n}",
        ),
        ("src/b.rs", "pub fn g() {}"),
        ("src/c.rs", "pub fn g() {}"),
    ]);
    assert_eq!(found, ["user:4 c", "user:7 b"]);
}

#[test]
fn tests_at_the_top_of_a_file_do_not_hide_what_follows() {
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", "#[cfg(test)]\nmod tests;\nuse crate::b::Thing;"),
        ("src/a/tests.rs", "use crate::c_that_does_not_exist;"),
        ("src/b.rs", "pub struct Thing;"),
    ]);
    assert_eq!(found, ["a:3 b"]);
}

#[test]
fn only_what_is_for_tests_is_cut_out() {
    let text = "#[cfg(test)]\nmod tests {\n    use crate::b::Thing;\n}\n\
                #[cfg(all(test, unix))]\nuse crate::b::Thing as A;\n\
                #[cfg(not(test))]\nuse crate::b::Thing as B;\n\
                #[cfg(any(test, feature = \"x\"))]\nuse crate::b::Thing as C;\n\
                impl S {\n    #[cfg(test)]\n    fn f() { crate::b::g(); }\n    \
                fn h() { crate::b::g(); }\n}\nstruct S;";
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", text),
        ("src/b.rs", "pub struct Thing; pub fn g() {}"),
    ]);
    assert_eq!(found, ["a:10 b", "a:14 b", "a:8 b"]);
}

#[test]
fn modules_with_a_path_and_modules_in_a_file_are_found() {
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", "#[path = \"other.rs\"]\nmod x;\nmod inline {\n    mod deep;\n}"),
        ("src/other.rs", "use crate::b::Thing;"),
        ("src/a/inline/deep.rs", "use crate::b::Thing;"),
        ("src/b.rs", "pub struct Thing;"),
    ]);
    assert_eq!(found, ["a/inline/deep:1 b", "other:1 b"]);
}

#[test]
fn variants_and_functions_of_types_belong_to_the_type() {
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "use crate::b::E;\nuse E::*;\nfn f() -> E {\n    crate::b::E::make()\n}"),
        ("src/b.rs", "pub enum E { One }"),
        ("src/c.rs", ""),
    ]);
    assert_eq!(found, ["a:1 b", "a:2 b", "a:3 b", "a:4 b"]);
}

#[test]
fn exported_macros_and_items_made_by_macros_have_a_home() {
    let found = arrows(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", "fn f(_: crate::b::Made) {\n    crate::shout!();\n}"),
        (
            "src/b.rs",
            "make! { pub struct Made; }\n#[macro_export]\nmacro_rules! shout { () => {} }",
        ),
    ]);
    assert_eq!(found, ["a:1 b", "a:2 b"]);
}

#[test]
fn arrows_lead_from_crate_to_crate() {
    let map = map_of(
        &[krate(Some("below"), "low/src/lib.rs"), krate(None, "high/src/main.rs")],
        &[
            ("low/src/lib.rs", "mod inner; pub use inner::Thing;"),
            ("low/src/inner.rs", "pub struct Thing;"),
            (
                "high/src/main.rs",
                "use below::Thing;\nuse std::net::TcpStream;\nfn f(_: below::No) {}",
            ),
        ],
    );
    let to: Vec<&str> = map
        .arrows
        .iter()
        .filter(|arrow| map.files[arrow.from] == "high/src/main.rs" && arrow.line == 1)
        .map(|arrow| map.files[arrow.to].as_str())
        .collect();
    assert_eq!(to, ["low/src/inner.rs"]);
    assert!(map.foreign.iter().any(|used| used.path == "std::net::TcpStream"));
    // What cannot be found is said, so that nothing is missed in silence.
    assert_eq!(map.unresolved.len(), 1);
}

#[test]
fn unsafe_is_found_in_code_and_in_macros_but_not_in_tests() {
    let map = map_of(
        &[krate(None, "src/lib.rs")],
        &[(
            "src/lib.rs",
            "#[cfg(test)]\nmod tests { fn f() { unsafe {} } }\nfn g() { unsafe {} }\n\
             unsafe impl Send for S {}\nfn h() { m!(unsafe { x }); }\n// unsafe { }\nunsafe fn i() {}",
        )],
    );
    let lines: Vec<usize> = map.unsafe_lines.iter().map(|(_, line)| *line).collect();
    assert_eq!(lines, [3, 4, 5, 7]);
}
