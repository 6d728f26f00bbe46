// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Places of a source file where one rule can be broken, and what stands there instead.

use std::ops::Range;

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr, ExprBinary, ExprLit, ExprMethodCall, ExprUnary, Lit, Stmt, UnOp};

/// One place.
pub(crate) struct Place {
    /// Bytes of the file that are replaced.
    pub(crate) range: Range<usize>,
    /// From 1.
    pub(crate) line: usize,
    /// What the break is, for people.
    pub(crate) what: String,
    /// The expression that behaves in the other way while the fault `{on}` is on.
    pub(crate) with: String,
}

/// All places of a file, in its order.
///
/// # Errors
/// It is no Rust.
pub(crate) fn of_source(source: &str) -> syn::Result<Vec<Place>> {
    let file = syn::parse_file(source)?;
    let mut finder = Finder { source, places: Vec::new() };
    finder.visit_file(&file);
    Ok(finder.places)
}

struct Finder<'a> {
    source: &'a str,
    places: Vec<Place>,
}

/// Methods whose result is a truth.
fn is_truth(method: &str) -> bool {
    let named = ["contains", "any", "all", "starts_with", "ends_with", "has"];
    method.starts_with("is_") || named.contains(&method)
}

/// The operator that breaks the rule of another.
fn other(op: &BinOp) -> Option<(&'static str, &'static str)> {
    Some(match op {
        BinOp::Eq(_) => ("==", "!="),
        BinOp::Ne(_) => ("!=", "=="),
        BinOp::Lt(_) => ("<", "<="),
        BinOp::Le(_) => ("<=", "<"),
        BinOp::Gt(_) => (">", ">="),
        BinOp::Ge(_) => (">=", ">"),
        BinOp::And(_) => ("&&", "||"),
        BinOp::Or(_) => ("||", "&&"),
        _ => return None,
    })
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_cfg = attribute.path().is_ident("cfg");
        is_cfg && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

impl Finder<'_> {
    fn text(&self, span: Span) -> &str {
        self.source.get(span.byte_range()).unwrap_or_default()
    }

    fn add(&mut self, span: Span, what: String, with: String) {
        self.places.push(Place { range: span.byte_range(), line: span.start().line, what, with });
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    // What the compiler has to know, and what people read, is left alone.
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if item.sig.constness.is_none() && !is_for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if item.sig.constness.is_none() && item.sig.ident != "fmt" && !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
    fn visit_pat(&mut self, _: &'ast syn::Pat) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}
    fn visit_item_enum(&mut self, _: &'ast syn::ItemEnum) {}

    fn visit_expr_repeat(&mut self, repeat: &'ast syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }

    fn visit_expr_binary(&mut self, binary: &'ast ExprBinary) {
        let has_let = |side: &Expr| self.text(side.span()).contains("let ");
        if let Some((own, other)) = other(&binary.op)
            && !has_let(&binary.left)
            && !has_let(&binary.right)
        {
            let (left, right) = (self.text(binary.left.span()), self.text(binary.right.span()));
            let with = format!(
                "(if {{on}} {{ ({left} {other} {right}) }} else {{ ({left} {own} {right}) }})"
            );
            let what = format!("{left} {other} {right}");
            self.add(binary.span(), what, with);
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_unary(&mut self, unary: &'ast ExprUnary) {
        if matches!(unary.op, UnOp::Not(_)) {
            let inner = self.text(unary.expr.span());
            let with = format!("(if {{on}} {{ {inner} }} else {{ !{inner} }})");
            self.add(unary.span(), inner.to_owned(), with);
        }
        visit::visit_expr_unary(self, unary);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if is_truth(&call.method.to_string()) {
            let text = self.text(call.span());
            let (what, with) = (format!("not {text}"), format!("({text} != {{on}})"));
            self.add(call.span(), what, with);
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_lit(&mut self, literal: &'ast ExprLit) {
        let span = literal.span();
        let text = self.text(span);
        match &literal.lit {
            Lit::Int(number) => {
                let Ok(value) = number.base10_parse::<u64>() else { return };
                let other = format!("{}{}", value ^ 1, number.suffix());
                let with = format!("(if {{on}} {{ {other} }} else {{ {text} }})");
                self.add(span, format!("{other} instead of {text}"), with);
            }
            Lit::Bool(truth) => {
                let not = if truth.value { "!" } else { "" };
                let with = format!("({not}{{on}})");
                self.add(span, format!("not {text}"), with);
            }
            _ => {}
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        if let Stmt::Expr(expression, Some(_)) = statement {
            let is_left_out = match expression {
                Expr::MethodCall(_) | Expr::Call(_) | Expr::Try(_) => true,
                Expr::Assign(assign) => matches!(*assign.left, Expr::Field(_) | Expr::Index(_)),
                _ => false,
            };
            if is_left_out {
                let text = self.text(statement.span());
                let with = format!("if !{{on}} {{ {text} }}");
                self.add(statement.span(), format!("without {text}"), with);
            }
        }
        visit::visit_stmt(self, statement);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "
        const LEN: usize = 8;
        fn check(a: &[u8], b: bool) -> bool {
            let mut list = vec![0; 4];
            list.push(1);
            if a.len() == LEN && !b { return true; }
            matches!(a.first(), Some(3)) || a.is_empty()
        }
        impl core::fmt::Display for X { fn fmt(&self) -> bool { true } }
        #[cfg(test)]
        mod tests { fn f() -> bool { 1 == 2 } }";

    #[test]
    fn rules_are_found_and_what_is_none_is_left_alone() {
        let found: Vec<String> =
            of_source(SOURCE).unwrap().into_iter().map(|place| place.what).collect();
        let expected = [
            "without list.push(1);",
            "0 instead of 1",
            "a.len() == LEN || !b",
            "a.len() != LEN",
            "b",
            "not true",
            "matches!(a.first(), Some(3)) && a.is_empty()",
            "not a.is_empty()",
        ];
        assert_eq!(found, expected);
    }
}
