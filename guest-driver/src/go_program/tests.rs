// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use super::*;

#[test]
fn versions_are_known_by_their_second_number() {
    for (version, known) in [
        ("go1.24.4", true),
        ("go1.19", true),
        ("go1.25rc1", true),
        ("go1.22.1 X:nocoverageredesign", true),
        ("go1.18.9", false),
        ("go1.27.3", true),
        ("go1.28", false),
        ("go1.190", false),
        ("go1.99999999999999999999", false),
        ("go2.20", false),
        ("devel go1.24-abc", false),
        ("", false),
    ] {
        assert_eq!(
            minor(version).is_some_and(|minor| VERSIONS.contains(&minor)),
            known,
            "{version}"
        );
    }
}

#[test]
fn another_program_is_none_in_go_and_calls_libc() {
    let this = std::env::current_exe().unwrap();
    assert!(GoProgram::of_file(&File::open(&this).unwrap()).is_none());
    assert_eq!(door(&this, |_| None), Some(Ok(Door::Libc)));
    assert_eq!(door(Path::new("/nowhere"), |_| None), None);
}

/// A file with the sections of a program in Go: at first without a dynamic linker.
#[cfg(target_arch = "x86_64")]
mod files {
    use super::*;

    /// A section named as in a program in Go, in an object of the assembler.
    fn program(dir: &smc_test_support::TestDir, version: &str, options: &[&str]) -> PathBuf {
        let (file, source) = (dir.join("program"), dir.join("source.s"));
        let text = format!(
            ".section .go.buildinfo,\"aw\"\n.balign 16\n.ascii \"\\xff Go buildinf:\"\n\
             .byte 8,2\n.zero 16\n.byte {}\n.ascii \"{version}\"\n.zero 64\n\
             .text\n.globl _start\n_start: hlt\n",
            version.len()
        );
        std::fs::write(&source, text).unwrap();
        let mut cc = std::process::Command::new("cc");
        cc.args(["-nostartfiles", "-o"]).arg(&file).arg(&source).args(options);
        assert!(cc.status().unwrap().success());
        file
    }

    #[test]
    fn a_program_in_go_without_its_parts_is_refused_by_name() {
        let dir = smc_test_support::TestDir::new();
        let of = |version: &str, options: &[&str]| {
            let file = program(&dir, version, options);
            match door(&file, |_| None) {
                Some(Err(NoDoor::Go(why))) => why,
                other => panic!("{other:?}"),
            }
        };
        let dynamic = ["-no-pie", "-Wl,--no-as-needed"];
        let table = GoObstacle::Table("it was not found");
        assert_eq!(of("go1.24.4", &["-static"]), table);
        let musl = "/lib/ld-musl-x86_64.so.1";
        let linker = format!("-Wl,-I{musl}");
        assert_eq!(
            of("go1.24.4", &["-pie", "-nostdlib", &linker]),
            GoObstacle::OtherLinker(musl.into())
        );
        assert_eq!(of("go1.14.4", &dynamic), GoObstacle::Version("go1.14.4".into()));
        assert_eq!(of("go1.24.4", &dynamic), table);
    }

    #[test]
    fn the_first_function_is_found_by_the_data_about_the_module() {
        let dir = smc_test_support::TestDir::new();
        let (path, source) = (dir.join("program"), dir.join("source.s"));
        let text_of = |table: &str, options: &[&str]| {
            let text = format!(
                ".section .gopclntab,\"aw\"\n.balign 8\ntable: .zero 72\n.section .go.module,\"aw\"\n\
                 .balign 8\n.quad {table}\n.zero 168\n.quad first\n\
                 .text\n.globl _start\n_start: hlt\nfirst: hlt\n"
            );
            std::fs::write(&source, text).unwrap();
            let mut cc = std::process::Command::new("cc");
            cc.args(["-nostdlib", "-o"]).args([&path, &source]).args(options);
            assert!(cc.status().unwrap().success());
            let file = File::open(&path).unwrap();
            let object = Object::read(&file).unwrap();
            let at = program_file::section(&file, b".gopclntab").unwrap().address;
            let start = program_file::section(&file, b".text").unwrap().address;
            text_start(&file, &object, &[0; 72], at).map(|text| text - start)
        };
        for options in [&["-no-pie", "-static"][..], &["-pie"]] {
            assert_eq!(text_of("table", options), Some(1), "{options:?}");
            assert_eq!(text_of("table + 8", options), None, "data of another table");
        }
    }
}
